//! The decisions of a run over several machines, without clock and network: reports and times in, orders out.
//!
//! Its states are on [the page of the module](super).

use std::time::{Duration, Instant};

use super::messages::{Failure, Farewell, Hello, Report};
use crate::launch::machines::MachineCount;

/// How long members have to read the last order.
const FAREWELL: Duration = Duration::from_secs(5);

/// What a run's launchers were told.
#[derive(Debug, Clone)]
pub(super) struct Rules {
    pub(super) count: MachineCount,
    pub(super) max_restarts: usize,
    pub(super) timeout: Duration,
    pub(super) last_call: Duration,
    pub(super) keep_alive: Duration,
    /// What members must have been told, too.
    pub(super) terms: Vec<(String, String)>,
}

/// What is to be done for a decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Act {
    /// Order a round with these members, by machine number.
    Start {
        round: usize,
        restarts: usize,
        members: Vec<String>,
    },
    Stop {
        round: usize,
    },
    Leave {
        id: String,
        farewell: Farewell,
    },
    End(Farewell),
    /// Tell it on all machines of the last round.
    Announce(String),
    /// Tell it on machine 0.
    Tell(String),
}

#[derive(Debug)]
pub(super) struct Coordinator {
    rules: Rules,
    members: Vec<Member>,
    /// Launchers whose place somebody has who may be dead, since when.
    waiting: Vec<(Hello, Instant)>,
    refused: Vec<String>,
    state: State,
    /// The number of the next round, or of this one.
    round: usize,
    restarts: usize,
}

#[derive(Debug)]
struct Member {
    hello: Hello,
    /// Its number in this round or the last one.
    number: Option<usize>,
    /// Of the round.
    is_in_round: bool,
    has_ended: bool,
    /// Whether it goes when its ranks have ended: the next round must not count on it.
    is_leaving: bool,
    last_beat: Instant,
}

#[derive(Debug)]
enum State {
    Gathering {
        since: Instant,
        enough_since: Option<Instant>,
    },
    Running,
    Stopping(Reason),
    Over {
        since: Instant,
    },
}

/// Why a round was stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Reason {
    Failed {
        id: String,
        at: Instant,
        text: String,
        code: u8,
        details: String,
    },
    Lost {
        text: String,
    },
    /// Members have changed.
    Changed {
        text: String,
    },
    Signal {
        text: String,
        code: u8,
    },
}

impl Coordinator {
    pub(super) fn new(rules: Rules, now: Instant) -> Self {
        Self {
            rules,
            members: Vec::new(),
            waiting: Vec::new(),
            refused: Vec::new(),
            state: State::Gathering {
                since: now,
                enough_since: None,
            },
            round: 0,
            restarts: 0,
        }
    }

    /// The IDs of the members that are there.
    pub(super) fn ids(&self) -> impl Iterator<Item = &str> {
        self.members.iter().map(|member| &*member.hello.id)
    }

    /// Whether nobody needs the store any more.
    pub(super) fn is_done(&self, now: Instant) -> bool {
        match self.state {
            State::Over { since } => self.members.is_empty() || now >= since + FAREWELL,
            _ => false,
        }
    }

    /// Whether the ranks of a round run.
    pub(super) fn is_in_round(&self) -> bool {
        matches!(self.state, State::Running | State::Stopping(_))
    }

    /// Takes note that a member was there a moment ago.
    pub(super) fn on_beat(&mut self, id: &str, now: Instant) {
        if let Some(member) = self.members.iter_mut().find(|member| member.hello.id == id) {
            member.last_beat = now;
        }
    }

    /// Decides what follows from a report.
    pub(super) fn on_report(&mut self, report: Report, now: Instant) -> Vec<Act> {
        let mut acts = Vec::new();
        match report {
            Report::Hello(hello) => self.on_hello(hello, now, &mut acts),
            Report::Failed { id, round, failure } if round == self.round => {
                self.on_failure(id, failure, now, &mut acts);
            }
            Report::Ended {
                id,
                round,
                is_success,
                details,
            } if round == self.round => self.on_end(&id, is_success, details, now, &mut acts),
            // Of a round that is over for everybody.
            Report::Failed { .. } | Report::Ended { .. } => {}
            Report::Leaving { id, signal, code } => self.on_leaving(&id, &signal, code, now, &mut acts),
            Report::Gone { id } => self.members.retain(|member| member.hello.id != id),
        }
        self.settle(now, &mut acts);
        acts
    }

    /// Decides what follows from time having passed.
    pub(super) fn on_time(&mut self, now: Instant) -> Vec<Act> {
        let mut acts = Vec::new();
        let keep_alive = self.rules.keep_alive;
        let (here, lost) = std::mem::take(&mut self.members)
            .into_iter()
            .partition(|member| now.saturating_duration_since(member.last_beat) < keep_alive || member.hello.is_host);
        self.members = here;
        for member in lost {
            self.on_loss(&member, &mut acts);
        }
        for (hello, since) in std::mem::take(&mut self.waiting) {
            match self.rival(&hello) {
                // A beat may have been on its way; one that comes later is of somebody alive.
                Some(rival) if rival.last_beat <= since + keep_alive / 2 => self.waiting.push((hello, since)),
                Some(rival) => {
                    let reason = format!("{} has that number already", rival.hello);
                    self.refuse(hello, &reason, &mut acts);
                }
                None => self.admit(hello, now, &mut acts),
            }
        }
        self.settle(now, &mut acts);
        acts
    }

    fn on_hello(&mut self, hello: Hello, now: Instant, acts: &mut Vec<Act>) {
        if matches!(self.state, State::Over { .. }) {
            return self.refuse(hello, "the run is over", acts);
        }
        if let Some(reason) = difference(&self.rules.terms, &hello.terms) {
            return self.refuse(hello, &reason, acts);
        }
        match self.rival(&hello) {
            Some(_) => self.waiting.push((hello, now)),
            None => self.admit(hello, now, acts),
        }
    }

    /// The member that has the place which a newcomer asks for.
    fn rival(&self, hello: &Hello) -> Option<&Member> {
        let number = if hello.is_host { Some(0) } else { hello.machine };
        let number = number?;
        self.members.iter().find(|member| {
            let of_member = if member.hello.is_host {
                Some(0)
            } else {
                member.hello.machine
            };
            of_member == Some(number)
        })
    }

    fn admit(&mut self, hello: Hello, now: Instant, acts: &mut Vec<Act>) {
        if self.members.len() == self.rules.count.most {
            let reason = format!("all {} machines are there already", self.members.len());
            return self.refuse(hello, &reason, acts);
        }
        if matches!(self.state, State::Running) {
            self.stop(
                Reason::Changed {
                    text: format!("{hello} has come"),
                },
                acts,
            );
        }
        self.members.push(Member {
            hello,
            number: None,
            is_in_round: false,
            has_ended: false,
            is_leaving: false,
            last_beat: now,
        });
    }

    fn refuse(&mut self, hello: Hello, reason: &str, acts: &mut Vec<Act>) {
        let text = format!("{hello} was turned away: {reason}");
        acts.push(Act::Tell(format!("notice: {text}\n")));
        self.refused.push(text);
        acts.push(Act::Leave {
            farewell: Farewell {
                text: format!("error: this launcher, {hello}, was turned away: {reason}\n"),
                code: 2,
            },
            id: hello.id,
        });
    }

    fn on_failure(&mut self, id: String, failure: Failure, now: Instant, acts: &mut Vec<Act>) {
        if matches!(self.state, State::Running) {
            let text = format!("{} on {} {}", failure.who, self.name(&id), failure.what);
            let reason = Reason::Failed {
                id,
                at: now,
                text,
                code: failure.code,
                details: String::new(),
            };
            self.stop(reason, acts);
        }
    }

    fn on_end(&mut self, id: &str, is_success: bool, text: String, now: Instant, acts: &mut Vec<Act>) {
        if matches!(self.state, State::Running) && !is_success {
            let failure = Failure {
                who: "a rank".to_owned(),
                what: "failed".to_owned(),
                code: 1,
            };
            self.on_failure(id.to_owned(), failure, now, acts);
        }
        if let State::Stopping(Reason::Failed { id: of, details, .. }) = &mut self.state
            && of == id
        {
            *details = text;
        }
        let member = self.members.iter_mut().find(|member| member.hello.id == id);
        if let Some(member) = member.filter(|member| member.is_in_round) {
            member.has_ended = true;
        }
    }

    fn on_leaving(&mut self, id: &str, signal: &str, code: u8, now: Instant, acts: &mut Vec<Act>) {
        let Some(member) = self.members.iter().find(|member| member.hello.id == id) else {
            return;
        };
        let text = format!("{} was stopped by {signal}", self.name(id));
        if !self.rules.count.is_elastic() || member.hello.is_host {
            let reason = Reason::Signal { text, code };
            match &mut self.state {
                State::Gathering { .. } => self.end(reason, now, acts),
                State::Running => self.stop(reason, acts),
                // Whatever the cause was: somebody wants no more rounds.
                State::Stopping(of) => *of = reason,
                State::Over { .. } => {}
            }
            return;
        }
        let is_in_round = member.is_in_round && !member.has_ended;
        match self.state {
            State::Running => self.stop(Reason::Changed { text }, acts),
            _ => acts.push(Act::Tell(format!("notice: {text}\n"))),
        }
        if !is_in_round {
            self.members.retain(|member| member.hello.id != id);
        } else if let Some(leaver) = self.members.iter_mut().find(|member| member.hello.id == id) {
            leaver.is_leaving = true;
        }
        acts.push(Act::Leave {
            id: id.to_owned(),
            farewell: Farewell {
                text: format!("error: stopped by {signal}\n"),
                code,
            },
        });
    }

    fn on_loss(&mut self, member: &Member, acts: &mut Vec<Act>) {
        if matches!(self.state, State::Over { .. }) {
            return;
        }
        let silence = self.rules.keep_alive.as_secs_f64();
        let name = member.name();
        // It may only have been slow; then it must know that the others do without it.
        acts.push(Act::Leave {
            id: member.hello.id.clone(),
            farewell: Farewell {
                text: format!("error: this launcher, {name}, was taken for gone: it was silent for {silence:.1} s\n"),
                code: 1,
            },
        });
        let text = format!("{name} is gone: its launcher has not been heard of for {silence:.1} s");
        match &self.state {
            State::Running if member.is_in_round && !member.has_ended => self.stop(Reason::Lost { text }, acts),
            State::Stopping(Reason::Failed {
                at, text: consequence, ..
            }) if member.is_in_round && member.last_beat < *at => {
                let text = format!("{text}\n  taken for a consequence: {consequence}");
                self.state = State::Stopping(Reason::Lost { text });
            }
            _ => acts.push(Act::Tell(format!("notice: {text}\n"))),
        }
    }

    fn stop(&mut self, reason: Reason, acts: &mut Vec<Act>) {
        self.state = State::Stopping(reason);
        acts.push(Act::Stop { round: self.round });
    }

    /// Goes on to the next state where what it waits for has come.
    fn settle(&mut self, now: Instant, acts: &mut Vec<Act>) {
        let is_over_here = |member: &Member| !member.is_in_round || member.has_ended;
        let round_is_over = self.members.iter().all(is_over_here);
        match &self.state {
            State::Running if round_is_over => {
                self.state = State::Over { since: now };
                acts.push(Act::End(Farewell {
                    text: String::new(),
                    code: 0,
                }));
            }
            State::Stopping(reason) if round_is_over => {
                let reason = reason.clone();
                self.conclude(reason, now, acts);
            }
            _ => {}
        }
        self.gather(now, acts);
    }

    /// Decides whether another round follows one that was stopped.
    fn conclude(&mut self, reason: Reason, now: Instant, acts: &mut Vec<Act>) {
        let most = self.rules.max_restarts;
        let text = match &reason {
            Reason::Signal { .. } => return self.end(reason, now, acts),
            Reason::Changed { text } => format!("notice: {text}; all ranks are started again\n"),
            Reason::Lost { text } if self.rules.count.is_elastic() => {
                format!("notice: {text}; all ranks are started again\n")
            }
            Reason::Failed { .. } | Reason::Lost { .. } if self.restarts == most => return self.end(reason, now, acts),
            Reason::Failed { text, details, .. } => {
                self.restarts += 1;
                let restart = self.restarts;
                format!("error: {text}\n{details}notice: all ranks are started again (restart {restart} of {most})\n")
            }
            Reason::Lost { text } => {
                self.restarts += 1;
                let restart = self.restarts;
                format!("error: {text}\nnotice: all ranks are started again (restart {restart} of {most})\n")
            }
        };
        self.round += 1;
        self.members.retain(|member| !member.is_leaving);
        for member in &mut self.members {
            member.is_in_round = false;
        }
        let missing = self.rules.count.least.saturating_sub(self.members.len());
        let waiting = match missing {
            0 => String::new(),
            _ => format!(
                "notice: waiting up to {:.0} s for {missing} of {} machines\n",
                self.rules.timeout.as_secs_f64(),
                self.rules.count.least
            ),
        };
        acts.push(Act::Announce(text + &waiting));
        self.state = State::Gathering {
            since: now,
            enough_since: None,
        };
    }

    fn end(&mut self, reason: Reason, now: Instant, acts: &mut Vec<Act>) {
        let (text, code) = match reason {
            Reason::Failed {
                text, code, details, ..
            } => (format!("error: {text}\n{details}"), code.max(1)),
            Reason::Lost { text } | Reason::Changed { text } => (format!("error: {text}\n"), 1),
            Reason::Signal { text, code } => (format!("error: {text}\n"), code),
        };
        self.state = State::Over { since: now };
        acts.push(Act::End(Farewell { text, code }));
    }

    /// Starts a round if enough machines are there, or gives up.
    fn gather(&mut self, now: Instant, acts: &mut Vec<Act>) {
        let MachineCount { least, most } = self.rules.count;
        let has_host = self.members.iter().any(|member| member.hello.is_host);
        let here = self.members.len();
        let State::Gathering { since, enough_since } = &mut self.state else {
            return;
        };
        let is_enough = has_host && here >= least;
        *enough_since = is_enough.then(|| enough_since.unwrap_or(now));
        let is_last_call_over = enough_since.is_some_and(|enough| now >= enough + self.rules.last_call);
        if is_enough && (here == most || is_last_call_over) {
            return self.start(acts);
        }
        if now >= *since + self.rules.timeout && !is_enough {
            let text = self.missing();
            self.state = State::Over { since: now };
            acts.push(Act::End(Farewell { text, code: 1 }));
        }
    }

    fn start(&mut self, acts: &mut Vec<Act>) {
        // Not by who came first: the same machines have the same numbers on every run.
        self.members.sort_by(|one, two| one.order().cmp(&two.order()));
        for (number, member) in self.members.iter_mut().enumerate() {
            member.number = Some(number);
            member.is_in_round = true;
            member.has_ended = false;
        }
        self.state = State::Running;
        acts.push(Act::Start {
            round: self.round,
            restarts: self.restarts,
            members: self.ids().map(str::to_owned).collect(),
        });
    }

    /// Who has come and who has not.
    fn missing(&self) -> String {
        let MachineCount { least, most } = self.rules.count;
        let here = Vec::from_iter(self.members.iter().map(|member| member.hello.to_string()));
        let mut text = format!(
            "error: {} of {least} machines came within {:.0} s: {}\n",
            here.len(),
            self.rules.timeout.as_secs_f64(),
            here.join(", ")
        );
        let has = |number: usize| self.members.iter().any(|member| member.hello.machine == Some(number));
        let missing = Vec::from_iter(
            (1..most)
                .filter(|number| !has(*number))
                .map(|number| number.to_string()),
        );
        if self.members.iter().all(|member| member.hello.machine.is_some()) {
            text += &format!("  missing: machine {}\n", missing.join(", "));
        }
        for refused in &self.refused {
            text += &format!("  {refused}\n");
        }
        text + "hint: is the launcher of each running, with the same --num_machines and a --machine_rank of its own?\n"
    }

    fn name(&self, id: &str) -> String {
        let member = self.members.iter().find(|member| member.hello.id == id);
        member.map_or_else(|| "a machine".to_owned(), Member::name)
    }
}

/// The first difference between what machine 0 and another one were told, if there is any.
fn difference(ours: &[(String, String)], theirs: &[(String, String)]) -> Option<String> {
    let all = ours.iter().chain(theirs).map(|(name, _)| name);
    let value = |terms: &[(String, String)], name: &String| {
        let found = terms.iter().find(|(of, _)| of == name);
        found.map_or_else(|| "not set".to_owned(), |(_, value)| format!("{value:?}"))
    };
    let mut differing = all.filter(|name| value(ours, name) != value(theirs, name));
    let name = differing.next()?;
    let (ours, theirs) = (value(ours, name), value(theirs, name));
    Some(format!(
        "{name} is {theirs} there and {ours} on machine 0; it must be the same on all machines"
    ))
}

impl Member {
    /// The machine's number and host, as messages name it.
    fn name(&self) -> String {
        match self.number {
            Some(number) => format!("machine {number} (host {})", self.hello.host),
            None => self.hello.to_string(),
        }
    }

    fn order(&self) -> (bool, usize, &str, &str) {
        let Hello { is_host, machine, .. } = self.hello;
        (
            !is_host,
            machine.unwrap_or(usize::MAX),
            &self.hello.host,
            &self.hello.id,
        )
    }
}

#[cfg(test)]
mod tests;
