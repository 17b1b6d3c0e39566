//! A launcher as one of several: introduces itself, carries out orders, and tells what becomes of its ranks.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::process::ExitCode;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::Signal;

use super::host::ranks_secret;
use super::link::{Link, Word};
use super::meeting::Meeting;
use super::messages::{Failure, Farewell, Hello, Order, Report, Start};
use crate::command_error::CommandError;
use crate::launch::failure::{self, after, name};
use crate::launch::place::{Place, RanksStore};
use crate::launch::rank_process::End;
use crate::launch::round::{Job, RoundEnd};
use crate::launch::stop_signals::StopSignals;
use crate::launch::supervise::{Cause, Others, RankEnd};
use crate::launch::surroundings::{Machines, join};
use crate::terminal::tell;

/// This machine's launcher, which the coordinator knows.
#[derive(Debug)]
pub(super) struct Member<'a> {
    job: &'a Job<'a>,
    machines: &'a Machines,
    id: String,
    signals: StopSignals,
    link: Link,
    /// Orders that have come and are not carried out.
    orders: VecDeque<Order>,
    lost: Option<String>,
    has_had_ranks: bool,
    /// Whether somebody has asked this launcher to stop.
    is_leaving: bool,
}

impl<'a> Member<'a> {
    /// Connects to the coordinator and says hello.
    ///
    /// # Errors
    /// When the store cannot be reached.
    pub(super) fn join(job: &'a Job<'a>, machines: &'a Machines, meeting: &Meeting) -> Result<Self, CommandError> {
        let system = |reason| CommandError::failure(format!("cannot join the other launchers: {reason}"));
        let signals = StopSignals::catch().map_err(system)?;
        let id = sconce_collectives::store::Secret::random().to_text()[..16].to_owned();
        let clients = [meeting.client()?, meeting.client()?];
        let link = Link::start(id.clone(), clients, meeting.interval, meeting.keep_alive).map_err(system)?;
        link.send(Report::Hello(Hello {
            id: id.clone(),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            pid: std::process::id(),
            machine: machines.rank,
            is_host: meeting.is_hosted(),
            terms: meeting.terms.clone(),
        }));
        Ok(Self {
            job,
            machines,
            id,
            signals,
            link,
            orders: VecDeque::new(),
            lost: None,
            has_had_ranks: false,
            is_leaving: false,
        })
    }

    /// Carries out orders until the run is over for this launcher.
    ///
    /// # Errors
    /// When the store is lost.
    pub(super) fn run(mut self) -> Result<ExitCode, CommandError> {
        loop {
            match self.next_order()? {
                Order::Start(start) => {
                    if let Some(machine) = start.members.iter().position(|id| *id == self.id) {
                        self.run_round(&start, machine);
                    }
                }
                // Of a round that is over here.
                Order::Stop { .. } => {}
                Order::Announce { text } if self.has_had_ranks => tell(&text),
                // From before this launcher's time.
                Order::Announce { .. } => {}
                Order::Leave { id, farewell } if id == self.id => return Ok(self.leave(&farewell)),
                Order::Leave { .. } => {}
                Order::End(farewell) => return Ok(self.leave(&farewell)),
            }
        }
    }

    fn leave(self, farewell: &Farewell) -> ExitCode {
        tell(&farewell.text);
        self.link.close(Report::Gone { id: self.id });
        ExitCode::from(farewell.code)
    }

    /// Waits for the next order; no rank of this machine runs meanwhile.
    fn next_order(&mut self) -> Result<Order, CommandError> {
        loop {
            self.take_words();
            if let Some(order) = self.orders.pop_front() {
                return Ok(order);
            }
            if let Some(reason) = &self.lost {
                return Err(self.store_is_lost(reason));
            }
            let word = self.link.descriptor();
            let mut waited = [
                PollFd::from_borrowed_fd(self.signals.descriptor(), PollFlags::IN),
                PollFd::from_borrowed_fd(word, PollFlags::IN),
            ];
            let time = self.link.cut_off_at().saturating_duration_since(Instant::now());
            match poll(&mut waited, Timespec::try_from(time).ok().as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(CommandError::failure(format!("cannot wait for orders: {error}"))),
            }
            let signals = self.signals.take();
            if let Some(signal) = signals.into_iter().find(|signal| *signal != Signal::TSTP) {
                if self.is_leaving {
                    // Asked twice, and nothing here has to be waited for.
                    let error = CommandError::failure(format!("stopped by {}", name(signal.as_raw())));
                    return Err(error.hint("the other launchers have not answered"));
                }
                self.tell_of_signal(signal);
            }
        }
    }

    fn run_round(&mut self, start: &Start, machine: usize) {
        self.has_had_ranks = true;
        let place = self.place(start, machine);
        let mut round = Round {
            id: &self.id,
            first_rank: place.rank(0),
            number: start.round,
            link: &mut self.link,
            orders: &mut self.orders,
            lost: &mut self.lost,
            must_stop: false,
        };
        let end = self.job.run(&place, &mut self.signals, &mut round);
        let (is_success, details) = match end {
            Ok(end) => {
                let by_signal = matches!(end.outcome.cause, Some(Cause::Signal(_)));
                self.is_leaving |= by_signal;
                if let Some(signal) = end.outcome.signal.filter(|_| !by_signal) {
                    self.tell_of_signal(signal);
                }
                let is_success = end.outcome.cause.is_none() && end.lost_output.is_none();
                let details = self.details(&end);
                if self.lost.is_some() {
                    // Nobody will tell more of it.
                    tell(&details);
                }
                if let Some(error) = &end.lost_output {
                    error.report();
                }
                (is_success, details)
            }
            Err(error) => {
                let failure = Failure {
                    who: "the launcher".to_owned(),
                    what: "could not start or watch its ranks".to_owned(),
                    code: 1,
                };
                self.link.send(Report::Failed {
                    id: self.id.clone(),
                    round: start.round,
                    failure,
                });
                (
                    false,
                    format!("  {}", error.to_string().replace('\n', "\n  ").trim_end_matches(' ')),
                )
            }
        };
        self.link.send(Report::Ended {
            id: self.id.clone(),
            round: start.round,
            is_success,
            details,
        });
    }

    /// What is known of how ranks ended, but for who failed first and how.
    fn details(&self, end: &RoundEnd) -> String {
        let Some(cause) = end.outcome.cause else {
            return String::new();
        };
        let report = failure::report(cause, end);
        match (cause, report.split_once('\n')) {
            (Cause::Rank(_), Some((_, rest))) => rest.to_owned(),
            _ => report,
        }
    }

    fn place(&self, start: &Start, machine: usize) -> Place {
        let secret = self.machines.secret.clone().unwrap_or_default();
        Place {
            run_id: start.run_id.clone(),
            round: start.round,
            restarts: start.restarts,
            machine,
            machines: start.members.len(),
            local_ranks: self.machines.local_ranks,
            main_address: self.machines.main_host.clone(),
            main_port: start.main_port,
            store: Some(RanksStore {
                address: join(&self.machines.main_host, start.store_port),
                secret: ranks_secret(&secret, &start.run_id, start.round),
            }),
        }
    }

    fn tell_of_signal(&mut self, signal: Signal) {
        self.is_leaving = true;
        self.link.send(leaving(&self.id, signal));
    }

    fn take_words(&mut self) {
        take_words(&mut self.link, &mut self.orders, &mut self.lost);
    }

    fn store_is_lost(&self, reason: &str) -> CommandError {
        let address = self.machines.main_address();
        CommandError::failure(format!("lost machine 0's launcher at {address}: {reason}"))
            .hint("this machine's ranks were stopped; see the output of machine 0, or its end if it was killed")
    }
}

fn leaving(id: &str, signal: Signal) -> Report {
    Report::Leaving {
        id: id.to_owned(),
        signal: name(signal.as_raw()),
        code: End::Signal(signal.as_raw()).exit_code(),
    }
}

/// Takes what has come, and notices if this member is cut off.
fn take_words(link: &mut Link, orders: &mut VecDeque<Order>, lost: &mut Option<String>) {
    while let Some(word) = link.take() {
        match word {
            Word::Order(order) => orders.push_back(order),
            Word::Lost(reason) => *lost = lost.take().or(Some(reason)),
        }
    }
    if lost.is_none() && Instant::now() >= link.cut_off_at() {
        *lost = Some("it does not answer; the network may be down".to_owned());
    }
}

/// The other members, while this one's ranks run.
#[derive(Debug)]
struct Round<'m> {
    id: &'m str,
    first_rank: usize,
    number: usize,
    link: &'m mut Link,
    orders: &'m mut VecDeque<Order>,
    lost: &'m mut Option<String>,
    must_stop: bool,
}

impl Others for Round<'_> {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.link.descriptor())
    }

    fn next_look(&self) -> Option<Instant> {
        self.lost.is_none().then(|| self.link.cut_off_at())
    }

    fn must_stop(&mut self) -> bool {
        take_words(self.link, self.orders, self.lost);
        let stops = |order: &Order| match order {
            Order::Stop { round } => *round == self.number,
            Order::Leave { id, .. } => id == self.id,
            Order::End(_) => true,
            Order::Start(_) | Order::Announce { .. } => false,
        };
        self.must_stop |= self.lost.is_some() || self.orders.iter().any(stops);
        self.must_stop
    }

    fn stopped_by(&mut self, cause: Cause, end: Option<RankEnd>, pid: Option<u32>) {
        let report = match (cause, end) {
            (Cause::Rank(local_rank), Some(end)) => Report::Failed {
                id: self.id.to_owned(),
                round: self.number,
                failure: Failure {
                    who: format!(
                        "rank {} (pid {})",
                        self.first_rank + local_rank,
                        pid.unwrap_or_default()
                    ),
                    what: format!("{} {}", end.end, after(end.after)),
                    code: end.end.exit_code(),
                },
            },
            (Cause::Signal(signal), _) => leaving(self.id, signal),
            (Cause::Elsewhere | Cause::Rank(_), _) => return,
        };
        self.link.send(report);
    }
}
