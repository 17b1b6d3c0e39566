//! A group of ranks around one segment: attaching, entering an operation together, failing together.

use super::descriptors::Links;
use super::failure;
use super::layout::{ABSENT, Call, LEFT, Layout, PRESENT, RankLine};
use super::liveness::Liveness;
use super::region::Regions;
use super::segment::Segment;
use super::waiting::{Patience, announce, glance, publish, wait, wake_sleepers};
use crate::collective::{Collective, Kind, Signature};
use crate::flight_recorder::FlightRecorder;
use crate::operations::dispatch;
use crate::traffic::{Traffic, TrafficCounters};
use crate::{Error, Options, Result};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Marks segments of this layout; change it with the layout.
const MAGIC: u64 = 0x7363_6f6e_6365_0001;

/// One rank's view of a group.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) segment: Segment,
    pub(super) options: Options,
    engine: Mutex<Engine>,
}

/// What changes from operation to operation.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) sequence: u64,
    pub(super) epoch: u32,
    pub(super) links: Links,
    pub(super) regions: Regions,
    pub(super) splits: u32,
    /// Pieces sent to each rank so far, wrapping.
    pub(super) sent: Vec<u32>,
    /// Pieces received from each rank so far, wrapping.
    pub(super) received: Vec<u32>,
    liveness: Liveness,
    recorder: FlightRecorder,
    traffic: TrafficCounters,
}

/// One operation under way on one rank.
#[derive(Debug)]
pub(super) struct Passage<'g> {
    pub(super) group: &'g Group,
    pub(super) engine: MutexGuard<'g, Engine>,
    pub(super) patience: Patience,
    pub(super) signature: Signature,
}

impl Group {
    /// Attaches to a segment and returns when all ranks have.
    pub(super) fn attach(
        name: String,
        rank: usize,
        size: usize,
        file: OwnedFd,
        links: Links,
        options: &Options,
    ) -> Result<Self> {
        let segment = Segment::map(&file, Layout { ranks: size })?;
        let magic = segment.control().magic.compare_exchange(0, MAGIC, Relaxed, Relaxed);
        if let Err(found) = magic
            && found != MAGIC
        {
            return Err(Error::Unsupported {
                what: format!("shared segment of layout {found:#x} where {MAGIC:#x} was expected"),
                hint: "start all ranks from the same build".into(),
            });
        }
        let line = segment.line(rank);
        if line.presence.swap(PRESENT, Relaxed) != ABSENT {
            return Err(Error::Unsupported {
                what: format!("a second rank {rank} in group {name}"),
                hint: "give every rank its own number".into(),
            });
        }
        line.process.store(std::process::id(), Relaxed);
        let engine = Engine {
            sequence: 0,
            epoch: 0,
            links,
            regions: Regions::default(),
            splits: 0,
            sent: vec![0; size],
            received: vec![0; size],
            liveness: Liveness::of_threads(),
            recorder: FlightRecorder::new(),
            traffic: TrafficCounters::default(),
        };
        let group = Self {
            name,
            rank,
            size,
            segment,
            options: options.clone(),
            engine: Mutex::new(engine),
        };
        let signature = Signature::of_kind(Kind::Barrier, 0);
        let mut passage = Passage {
            group: &group,
            engine: group.lock(),
            patience: Patience::behind(),
            signature,
        };
        passage.synchronise()?;
        passage.engine.liveness = Liveness::of_processes(&group.segment)?;
        drop(passage);
        Ok(group)
    }

    /// Runs one collective from its checks to its end.
    pub(super) fn run(&self, collective: Collective<'_>, patience: Patience) -> Result<()> {
        collective.check(self.rank, self.size)?;
        let signature = collective.signature(self.size);
        self.pass(signature, patience, |passage| dispatch(passage, collective))
    }

    /// Runs `work` as one recorded operation; a failure becomes the failure of the whole group.
    pub(super) fn pass<R>(
        &self,
        signature: Signature,
        patience: Patience,
        work: impl FnOnce(&mut Passage<'_>) -> Result<R>,
    ) -> Result<R> {
        let mut passage = Passage {
            group: self,
            engine: self.lock(),
            patience,
            signature,
        };
        if let Some(error) = failure::recorded(self.segment.control()) {
            return Err(error);
        }
        let sequence = passage.engine.sequence;
        passage.engine.recorder.begin(sequence, signature);
        let result = work(&mut passage);
        match &result {
            Ok(_) => {
                passage.engine.recorder.end();
                passage.engine.traffic.count(&signature);
            }
            Err(error) => {
                if !matches!(error, Error::Aborted { .. }) {
                    failure::record(self.segment.control(), self.rank, &error.to_string());
                }
                passage
                    .engine
                    .recorder
                    .tell(&self.options, &self.name, self.rank, &error.to_string());
            }
        }
        result
    }

    /// Returns what has been moved so far.
    pub(super) fn traffic(&self) -> Vec<Traffic> {
        self.lock().traffic.read()
    }

    /// Makes every rank's current or next operation fail.
    pub(super) fn abort(&self, reason: &str) {
        failure::record(self.segment.control(), self.rank, reason);
    }

    /// Tells the peers that this rank will come no more.
    pub(super) fn leave(&self) {
        self.segment
            .line(self.rank)
            .presence
            .store(LEFT, std::sync::atomic::Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Engine> {
        // A panic inside an operation has recorded or will record a failure; the engine is not used afterwards.
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'g> Passage<'g> {
    /// Announces this rank's call, waits for all ranks' and compares them.
    ///
    /// `location` says where this rank's buffer lies in shared regions (0: nowhere). Returns the number of the
    /// operation; peers' locations are read by [`Passage::location_of`].
    pub(super) fn enter(&mut self, location: u64) -> Result<u64> {
        let sequence = self.engine.sequence;
        let line = self.line(self.group.rank);
        let call = call_of(line, sequence);
        call.signature.store(self.signature.pack(), Relaxed);
        call.count.store(self.signature.count, Relaxed);
        call.location.store(location, Relaxed);
        line.entered.store(sequence as u32 + 1, Relaxed);
        self.synchronise()?;
        self.engine.sequence += 1;
        self.compare(sequence)?;
        Ok(sequence)
    }

    /// Returns where `rank`'s buffer of operation `sequence` lies, 0 if not in a shared region.
    pub(super) fn location_of(&self, rank: usize, sequence: u64) -> u64 {
        call_of(self.line(rank), sequence).location.load(Relaxed)
    }

    /// Publishes one step and waits until all ranks have published as many.
    pub(super) fn synchronise(&mut self) -> Result<()> {
        self.engine.epoch = self.engine.epoch.wrapping_add(1);
        let (epoch, own) = (self.engine.epoch, &self.line(self.group.rank).epoch);
        announce(own, epoch);
        // Peers' lines come over while the own one goes out.
        let come = |rank| rank == self.group.rank || glance(&self.line(rank).epoch, |seen| is_reached(seen, epoch));
        let all = (0..self.group.size).all(come);
        wake_sleepers(self.group.segment.control(), own);
        if all { Ok(()) } else { self.wait_for_all(epoch) }
    }

    /// Publishes one step.
    pub(super) fn publish(&mut self) {
        self.engine.epoch = self.engine.epoch.wrapping_add(1);
        publish(
            self.group.segment.control(),
            &self.line(self.group.rank).epoch,
            self.engine.epoch,
        );
    }

    /// Waits until all ranks have published step `epoch`.
    pub(super) fn wait_for_all(&self, epoch: u32) -> Result<()> {
        let reached = |seen| is_reached(seen, epoch);
        let control = self.group.segment.control();
        for rank in (0..self.group.size).filter(|rank| *rank != self.group.rank) {
            let word = &self.line(rank).epoch;
            wait(control, word, self.patience, reached, |waited| {
                self.look_after(rank, waited, &|rank| reached(self.line(rank).epoch.load(Acquire)))
            })?;
        }
        Ok(())
    }

    /// Looks whether waiting for `rank` still makes sense; `came` says whether a rank has come meanwhile.
    ///
    /// # Errors
    /// The group's recorded failure, a dead or departed peer, or a passed deadline.
    pub(super) fn look_after(&self, rank: usize, waited: Duration, came: &dyn Fn(usize) -> bool) -> Result<()> {
        let segment = &self.group.segment;
        let recorded = failure::recorded(segment.control());
        let dead = self.engine.liveness.dead(segment);
        let left = segment.line(rank).presence.load(Acquire) == LEFT;
        // Read after the three: a peer that came and then left (or died) has still done its part.
        if came(rank) {
            return Ok(());
        }
        let lost = |peer, reason| Error::PeerLost {
            rank: self.group.rank,
            peer,
            reason,
            operation: self.describe(),
        };
        if let Some(error) = recorded {
            return Err(error);
        }
        if let Some(peer) = dead {
            return Err(lost(peer, "died"));
        }
        if left {
            return Err(lost(rank, "left the group"));
        }
        if waited > self.group.options.timeout {
            let others = (0..self.group.size).filter(|peer| *peer != self.group.rank);
            return Err(Error::Timeout {
                rank: self.group.rank,
                seconds: waited.as_secs_f64(),
                operation: self.describe(),
                missing: others.filter(|peer| !came(*peer)).collect(),
            });
        }
        Ok(())
    }

    /// Describes the operation for messages.
    pub(super) fn describe(&self) -> String {
        format!(
            "{} (operation {} of {})",
            self.signature, self.engine.sequence, self.group.name
        )
    }

    /// Makes the error for ranks that called different operations.
    pub(super) fn mismatch(&self, sequence: u64, calls: impl Iterator<Item = (usize, String)>) -> Error {
        let calls: Vec<_> = calls.map(|(rank, call)| format!("rank {rank}: {call}")).collect();
        Error::Mismatch {
            sequence,
            group: self.group.name.clone(),
            calls: calls.join("; "),
        }
    }

    /// Describes what `rank` announced as operation `sequence`.
    pub(super) fn announced(&self, rank: usize, sequence: u64) -> String {
        let call = call_of(self.line(rank), sequence);
        let signature = Signature::unpack(call.signature.load(Relaxed), call.count.load(Relaxed));
        signature.map_or_else(|| "an unknown operation".into(), |signature| signature.to_string())
    }

    pub(super) fn line(&self, rank: usize) -> &'g RankLine {
        self.group.segment.line(rank)
    }

    fn compare(&self, sequence: u64) -> Result<()> {
        let own = (self.signature.pack(), self.signature.count);
        let differs = |rank: usize| {
            let call = call_of(self.line(rank), sequence);
            (call.signature.load(Relaxed), call.count.load(Relaxed)) != own
        };
        if (0..self.group.size).any(differs) {
            return Err(self.mismatch(
                sequence,
                (0..self.group.size).map(|rank| (rank, self.announced(rank, sequence))),
            ));
        }
        Ok(())
    }
}

/// Says whether a rank that has published `seen` steps has published step `epoch`; both wrap.
fn is_reached(seen: u32, epoch: u32) -> bool {
    seen.wrapping_sub(epoch) as i32 >= 0
}

fn call_of(line: &RankLine, sequence: u64) -> &Call {
    &line.calls[(sequence % 2) as usize]
}
