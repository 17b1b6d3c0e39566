//! Waiting for requests: MPI makes progress only inside its calls, so waiting is testing, with a pause in between.
//!
//! First none, then the core is given to others; who waits for a rank that has not come yet sleeps, longer and longer, up
//! to a millisecond. Who waits for data never sleeps: it is MPI that copies it, in these very calls.

use super::group::Passage;
use super::library::Requests;
use super::notices::Peer;
use crate::{Error, Result};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How long a rank that gives up waits for what it has cancelled.
const SETTLING: Duration = Duration::from_secs(1);

/// How many tests lie between two looks at peers and the clock.
const LOOK_EVERY: u32 = 64;

/// How patiently to test.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// Tests without a pause while waiting for a rank.
    spins: u32,
    /// The same while data is on its way, which moves in these very tests.
    spins_on_data: u32,
}

impl Patience {
    /// For a caller with nothing else to do, on a host with `local_ranks` ranks.
    pub(super) fn of_caller(local_ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if local_ranks <= cores {
            // Some 100 µs, and some milliseconds: as long as MPI's own waiting would be worth it.
            Self {
                spins: 1000,
                spins_on_data: 20_000,
            }
        } else {
            Self::behind()
        }
    }

    /// For work behind other work, which should not take its core.
    pub(super) fn behind() -> Self {
        Self {
            spins: 10,
            spins_on_data: 50,
        }
    }
}

/// The pauses of one wait.
#[derive(Debug)]
pub(super) struct Pause {
    patience: Patience,
    /// Whether what is waited for may be far off.
    pub(super) may_sleep: bool,
    tests: u32,
    since: Option<Instant>,
}

impl Pause {
    pub(super) fn new(patience: Patience, may_sleep: bool) -> Self {
        Self {
            patience,
            may_sleep,
            tests: 0,
            since: None,
        }
    }

    /// Pauses; returns now and then how long the wait has been, as a time to look around.
    pub(super) fn pause(&mut self) -> Option<Duration> {
        self.tests += 1;
        let spins = if self.may_sleep {
            self.patience.spins
        } else {
            self.patience.spins_on_data
        };
        if self.tests <= spins {
            std::hint::spin_loop();
            return None;
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        if !self.may_sleep {
            std::thread::yield_now();
            return self.tests.is_multiple_of(LOOK_EVERY).then(|| since.elapsed());
        }
        let waited = since.elapsed();
        if waited < Duration::from_micros(500) {
            std::thread::yield_now();
        } else {
            std::thread::sleep((waited / 16).min(Duration::from_millis(1)));
        }
        Some(waited)
    }
}

impl Passage<'_> {
    /// Waits until all ranks' calls have come.
    pub(super) fn wait_for_calls(&self, calls: &mut Requests) -> Result<()> {
        let (library, all) = (self.group.library, calls.len());
        let mut pause = Pause::new(self.patience, true);
        while !calls.have_ended(library, all)? {
            let Some(waited) = pause.pause() else { continue };
            self.group.read_notices()?;
            let anyone_is_gone = (0..self.group.size).any(|rank| self.group.peer(rank) != Peer::There);
            let is_late = waited > self.timeout;
            if !anyone_is_gone && !is_late {
                continue;
            }
            // A call was sent before the notice of its rank, and is here if the notice is.
            let missing = calls.missing(library);
            missing.iter().try_for_each(|rank| self.is_there(*rank))?;
            if is_late && !missing.is_empty() {
                return Err(self.late(waited, missing));
            }
        }
        Ok(())
    }

    /// Waits until the first `count` of `data`, messages that all sides have agreed on, have ended.
    ///
    /// # Errors
    /// None of the requests is under way any more then.
    pub(super) fn wait_for_data(&mut self, data: &mut Requests, count: usize) -> Result<()> {
        let library = self.group.library;
        let mut pause = Pause::new(self.patience, false);
        loop {
            let error = match data.have_ended(library, count) {
                Ok(true) => return Ok(()),
                Ok(false) => match pause.pause() {
                    Some(waited) if waited > self.timeout => self.late(waited, data.missing(library)),
                    _ => continue,
                },
                Err(error) => error,
            };
            self.settle(data, &error);
            return Err(error);
        }
    }

    /// Gets the caller's memory back from MPI, or ends the job.
    pub(super) fn settle(&mut self, data: &mut Requests, error: &Error) {
        let (library, start) = (self.group.library, Instant::now());
        data.cancel_receives(library);
        while !data.have_ended(library, data.len()).unwrap_or(false) {
            if start.elapsed() > SETTLING {
                let group = self.group;
                let recorder = &mut self.engine.recorder;
                recorder.tell(&group.options, &group.name, group.rank, &error.to_string());
                // The only way left to say it.
                eprintln!(
                    "error: {error}\nerror: rank {} ends the job: MPI still holds its memory",
                    group.rank
                );
                library.abort();
            }
            std::thread::yield_now();
        }
        data.clear();
    }

    /// Makes a call of MPI's that cannot be left, and ends the job if it takes longer than this operation may.
    pub(super) fn or_end_the_job<R>(&mut self, call: impl FnOnce() -> Result<R>) -> Result<R> {
        let (seconds, operation) = (self.timeout.as_secs_f64(), self.describe());
        let (options, name, rank) = (&self.group.options, &self.group.name, self.group.rank);
        let (library, timeout, recorder) = (self.group.library, self.timeout, &mut self.engine.recorder);
        let (done, is_done) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                if is_done.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
                    let error =
                        format!("rank {rank} waited {seconds:.1} s inside MPI, without a deadline, in {operation}");
                    recorder.tell(options, name, rank, &error);
                    // As when data does not come: nothing else can be done.
                    eprintln!("error: {error}\nerror: rank {rank} ends the job: the call cannot be left");
                    library.abort();
                }
            });
            let result = call();
            drop(done);
            result
        })
    }

    /// Finds out whether waiting for `rank` makes sense.
    pub(super) fn is_there(&self, rank: usize) -> Result<()> {
        match self.group.peer(rank) {
            Peer::There => Ok(()),
            Peer::Failed => Err(self.group.failure().unwrap_or_else(|| self.lost(rank, "failed"))),
            Peer::Left => Err(self.lost(rank, "left the group")),
        }
    }

    pub(super) fn late(&self, waited: Duration, missing: Vec<usize>) -> Error {
        Error::Timeout {
            rank: self.group.rank,
            seconds: waited.as_secs_f64(),
            operation: self.describe(),
            missing,
        }
    }

    fn lost(&self, peer: usize, reason: &'static str) -> Error {
        Error::PeerLost {
            rank: self.group.rank,
            peer,
            reason,
            operation: self.describe(),
        }
    }
}
