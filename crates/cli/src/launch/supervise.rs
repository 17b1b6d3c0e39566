//! Watches the ranks until all have ended: passes signals on, and stops everything once one rank fails.
//!
//! The run is in one of four states, and only moves forward:
//!
//! | state | entered when | what happens |
//! | --- | --- | --- |
//! | running | at the start | ranks that end with 0 just leave |
//! | settling | a rank fails | the others have [`SETTLING`] to notice it, tell what they saw and end by themselves |
//! | stopping | that time is over (all get SIGTERM) or a stop signal comes (all get that signal) | ranks have the grace to end |
//! | killed | the grace is over, or Ctrl-C comes while stopping | all get SIGKILL |
//!
//! Where other machines have ranks of the same world, a run is also stopped because of one of them: it settles then, as
//! after a failure here ([`Others`]).
//!
//! The first failure is the cause; a rank that ends after it, or after the stop signal, is a consequence, whatever its
//! exit code. Nothing here polls: the launcher sleeps until a rank ends, a signal or word from the others comes, or a time
//! is over.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::Signal;
use signal_hook::low_level::emulate_default_handler;

use super::rank_process::{End, Group, RankProcess};
use super::stop_signals::StopSignals;

/// How long ranks have to end by themselves once one has failed: those that wait for it notice within a fraction of this,
/// print their error and write down their last operations.
const SETTLING: Duration = Duration::from_secs(1);

/// How a run went.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    /// Why the run was stopped, unless every rank ended with 0 unasked.
    pub(super) cause: Option<Cause>,
    /// The first signal to stop, whether or not it is the cause.
    pub(super) signal: Option<Signal>,
    /// How each rank ended.
    pub(super) ends: Vec<RankEnd>,
}

/// What stopped a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// This rank failed before anything else went wrong.
    Rank(usize),
    /// The launcher got this signal.
    Signal(Signal),
    /// Something elsewhere: a rank of another machine, or another machine itself.
    Elsewhere,
}

/// Who else has ranks of the same world: told what stops the run here, and asked whether something has elsewhere.
pub(super) trait Others {
    /// A descriptor that becomes readable when there is word from them.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
    /// When to ask even without word from them.
    fn next_look(&self) -> Option<Instant>;
    /// Whether the run must stop because of something elsewhere.
    fn must_stop(&mut self) -> bool;
    /// Tells them that something here stops the run: for a rank how it ended, and its process id.
    fn stopped_by(&mut self, cause: Cause, end: Option<RankEnd>, pid: Option<u32>);
}

/// There are no ranks but this machine's.
#[derive(Debug)]
pub(super) struct Nobody;

impl Others for Nobody {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn next_look(&self) -> Option<Instant> {
        None
    }

    fn must_stop(&mut self) -> bool {
        false
    }

    fn stopped_by(&mut self, _: Cause, _: Option<RankEnd>, _: Option<u32>) {}
}

/// How and when one rank ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct RankEnd {
    pub(super) end: End,
    /// Since the start of the run.
    pub(super) after: Duration,
    /// Whether the run had its [`Cause`] already.
    pub(super) is_consequence: bool,
    /// Whether the rank had to be killed, since it was still there at the end of the grace.
    pub(super) was_killed: bool,
}

impl Outcome {
    /// The launcher's exit code.
    pub(super) fn exit_code(&self) -> u8 {
        match self.cause {
            None => 0,
            Some(Cause::Rank(rank)) => self.ends[rank].end.exit_code(),
            Some(Cause::Signal(signal)) => End::Signal(signal.as_raw()).exit_code(),
            Some(Cause::Elsewhere) => 1,
        }
    }
}

/// Supervises `ranks`, which were started at `started`, until all have ended.
///
/// # Errors
/// When the system no longer tells about the processes. Dropping the ranks then kills them.
pub(super) fn supervise(
    ranks: &[RankProcess],
    signals: &mut StopSignals,
    grace: Duration,
    started: Instant,
    others: &mut dyn Others,
) -> io::Result<Outcome> {
    let ends = vec![None; ranks.len()];
    let mut run = Run {
        ranks,
        grace,
        started,
        state: State::Running,
        cause: None,
        signal: None,
        ends,
    };
    while run.ends.iter().any(Option::is_none) {
        run.wait(signals, others)?;
        let had_cause = run.cause.is_some();
        // Signals come first: a rank that a Ctrl-C from the terminal has ended is no failure.
        for signal in signals.take() {
            run.on_signal(signal);
        }
        run.collect_ends()?;
        if let Some(cause) = run.cause
            && !had_cause
        {
            match cause {
                Cause::Rank(rank) => others.stopped_by(cause, run.ends[rank], Some(ranks[rank].pid())),
                Cause::Signal(_) | Cause::Elsewhere => others.stopped_by(cause, None, None),
            }
        }
        if others.must_stop() {
            run.on_stop();
        }
        run.check_deadline();
    }
    let ends = run
        .ends
        .into_iter()
        .map(|end| end.expect("the loop ends when all ranks have"))
        .collect();
    Ok(Outcome {
        cause: run.cause,
        signal: run.signal,
        ends,
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Settling { until: Instant },
    Stopping { until: Instant },
    Killed,
}

#[derive(Debug)]
struct Run<'a> {
    ranks: &'a [RankProcess],
    grace: Duration,
    started: Instant,
    state: State,
    cause: Option<Cause>,
    signal: Option<Signal>,
    ends: Vec<Option<RankEnd>>,
}

impl Run<'_> {
    /// Sleeps until a rank ends, a signal or word from the others comes, or a time is over.
    fn wait(&self, signals: &StopSignals, others: &dyn Others) -> io::Result<()> {
        let mut waited = vec![PollFd::from_borrowed_fd(signals.descriptor(), PollFlags::IN)];
        waited.extend(
            others
                .descriptor()
                .map(|word| PollFd::from_borrowed_fd(word, PollFlags::IN)),
        );
        let running = self.ranks.iter().zip(&self.ends).filter(|(_, end)| end.is_none());
        waited.extend(running.map(|(rank, _)| PollFd::from_borrowed_fd(rank.pidfd(), PollFlags::IN)));
        let until = match self.state {
            State::Settling { until } | State::Stopping { until } => Some(until),
            State::Running | State::Killed => None,
        };
        let until = until.into_iter().chain(others.next_look()).min();
        let timeout = until.and_then(|until| Timespec::try_from(until.saturating_duration_since(Instant::now())).ok());
        match poll(&mut waited, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn on_signal(&mut self, signal: Signal) {
        if signal == Signal::TSTP {
            return self.pause();
        }
        if signal == Signal::INT && matches!(self.state, State::Stopping { .. } | State::Killed) {
            return self.kill();
        }
        self.cause.get_or_insert(Cause::Signal(signal));
        self.signal.get_or_insert(signal);
        for rank in self.ranks {
            let sent_by_terminal = rank.group() == Group::Launcher && matches!(signal, Signal::INT | Signal::QUIT);
            if !sent_by_terminal {
                rank.signal(signal);
            }
        }
        self.begin_stopping();
    }

    /// Stops the ranks and the launcher, as Ctrl-Z asks, and lets the ranks go on when the launcher does.
    fn pause(&self) {
        let own_groups = || self.ranks.iter().filter(|rank| rank.group() != Group::Launcher);
        own_groups().for_each(|rank| rank.signal(Signal::TSTP));
        // Returns when the launcher is continued.
        let _ = emulate_default_handler(Signal::TSTP.as_raw());
        own_groups().for_each(|rank| rank.signal(Signal::CONT));
    }

    fn collect_ends(&mut self) -> io::Result<()> {
        let after = self.started.elapsed();
        let mut ended = Vec::new();
        for (rank, process) in self
            .ranks
            .iter()
            .enumerate()
            .filter(|(rank, _)| self.ends[*rank].is_none())
        {
            if let Some(end) = process.end()? {
                ended.push((rank, end));
            }
        }
        // Of ranks that ended too close together to tell, one that was killed is likelier the cause than one that may
        // have noticed its death.
        ended.sort_by_key(|(_, end)| matches!(end, End::Code(_)));
        for (rank, end) in ended {
            let is_consequence = self.cause.is_some();
            let was_killed = self.state == State::Killed && end == End::Signal(Signal::KILL.as_raw());
            self.ends[rank] = Some(RankEnd {
                end,
                after,
                is_consequence,
                was_killed,
            });
            if !end.is_success() && !is_consequence {
                self.cause = Some(Cause::Rank(rank));
                self.begin_settling();
            }
        }
        Ok(())
    }

    fn on_stop(&mut self) {
        if self.state == State::Running {
            self.cause.get_or_insert(Cause::Elsewhere);
            self.begin_settling();
        }
    }

    fn begin_settling(&mut self) {
        self.state = State::Settling {
            until: Instant::now() + SETTLING,
        };
    }

    fn begin_stopping(&mut self) {
        if matches!(self.state, State::Running | State::Settling { .. }) {
            // A grace too long for the clock is one that never ends, as far as anyone can wait.
            let now = Instant::now();
            let far = now + Duration::from_secs(u64::from(u32::MAX));
            self.state = State::Stopping {
                until: now.checked_add(self.grace).unwrap_or(far),
            };
        }
    }

    fn check_deadline(&mut self) {
        match self.state {
            State::Settling { until } if Instant::now() >= until => {
                self.ranks.iter().for_each(|rank| rank.signal(Signal::TERM));
                self.begin_stopping();
            }
            State::Stopping { until } if Instant::now() >= until => self.kill(),
            _ => {}
        }
    }

    fn kill(&mut self) {
        self.state = State::Killed;
        self.ranks.iter().for_each(|rank| rank.signal(Signal::KILL));
    }
}
