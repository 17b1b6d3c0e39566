//! A group of ranks: entering an operation together, and failing together.

use super::library::{Channel, LARGEST_MESSAGE, Library, Requests};
use super::notices::Notices;
use super::waiting::Patience;
use crate::collective::{Collective, Signature};
use crate::flight_recorder::FlightRecorder;
use crate::operations::dispatch;
use crate::private::Private;
use crate::traffic::{Traffic, TrafficCounters};
use crate::{Buffer, Error, Options, Result};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Tag of a call.
pub(super) const CALL: i32 = 1;

/// Bytes before the data in a call or message; the data is aligned.
const HEADER: usize = 64;

/// Bytes of a call with data that MPI libraries send without asking the receiver.
const EAGER: usize = 63 * 64;

/// Most bytes of data that go with a call between two ranks: to send them whole takes as many bytes as to exchange parts, and
/// fewer messages, which is worth copying them.
const SMALL_FOR_TWO: usize = 256 << 10;

// A call is one message.
const _: () = assert!(HEADER + SMALL_FOR_TWO <= LARGEST_MESSAGE);

/// One rank's view of a group.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: String,
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Most bytes of data that go with a call; the same on all ranks.
    pub(super) small: usize,
    /// How many of the job's ranks this host has.
    pub(super) local_ranks: usize,
    pub(super) library: &'static Library,
    pub(super) channel: Channel,
    pub(super) options: Options,
    pub(super) notices: Notices,
    engine: Mutex<Engine>,
}

/// What changes from operation to operation.
#[derive(Debug)]
pub(super) struct Engine {
    sequence: u64,
    pub(super) splits: u32,
    /// What comes: one slot for each rank, and one for what is not a call.
    pub(super) inbox: Slots,
    /// What goes: likewise.
    pub(super) outbox: Slots,
    /// Memory for what is reduced, kept so that its pages are touched once.
    pub(super) scratch: Option<Buffer>,
    pub(super) recorder: FlightRecorder,
    traffic: TrafficCounters,
}

/// Memory for calls. It stays where it is even if the group goes while MPI holds it: see [`Passage::give_up`].
#[derive(Debug)]
pub(super) struct Slots {
    memory: Option<Buffer>,
    each: usize,
}

/// All slots as memory for MPI.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lent {
    memory: Private,
    each: usize,
}

impl Slots {
    fn new(count: usize, each: usize) -> Self {
        Self {
            memory: Some(Buffer::on_heap(count * each)),
            each,
        }
    }

    /// Lends the slots; once for all messages of an operation.
    pub(super) fn lend(&mut self) -> Lent {
        let memory = self.memory.as_mut().expect("a group that gave up enters nothing");
        Lent {
            memory: Private::of_mut(memory.as_mut_slice()),
            each: self.each,
        }
    }

    fn give_up(&mut self) {
        std::mem::forget(self.memory.take());
    }
}

impl Lent {
    /// Returns one of the slots.
    pub(super) fn slot(&self, number: usize) -> Private {
        self.memory.part(number * self.each..(number + 1) * self.each)
    }
}

/// One operation under way on one rank.
#[derive(Debug)]
pub(super) struct Passage<'g> {
    pub(super) group: &'g Group,
    pub(super) engine: MutexGuard<'g, Engine>,
    pub(super) patience: Patience,
    pub(super) signature: Signature,
    /// How long this operation waits for its peers.
    pub(super) timeout: Duration,
}

impl Group {
    pub(super) fn new(
        name: String,
        rank: usize,
        size: usize,
        local_ranks: usize,
        library: &'static Library,
        channel: Channel,
        options: Options,
    ) -> Self {
        let small = if size == 2 { SMALL_FOR_TWO } else { EAGER - HEADER };
        let slots = || Slots::new(size + 1, HEADER + small);
        let engine = Engine {
            sequence: 0,
            splits: 0,
            inbox: slots(),
            outbox: slots(),
            scratch: None,
            recorder: FlightRecorder::new(),
            traffic: TrafficCounters::default(),
        };
        Self {
            name,
            rank,
            size,
            small,
            local_ranks,
            library,
            channel,
            options,
            notices: Notices::new(size),
            engine: Mutex::new(engine),
        }
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
        self.library.under_way.fetch_add(1, SeqCst);
        let result = self.pass_counted(signature, patience, work);
        self.library.under_way.fetch_sub(1, SeqCst);
        result
    }

    fn pass_counted<R>(
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
            timeout: self.options.timeout,
        };
        let failed_before = self.read_notices().and_then(|()| self.failure().map_or(Ok(()), Err));
        let result = failed_before.and_then(|()| {
            let sequence = passage.engine.sequence;
            passage.engine.recorder.begin(sequence, signature);
            work(&mut passage)
        });
        match &result {
            Ok(_) => {
                passage.engine.recorder.end();
                passage.engine.traffic.count(&signature);
            }
            Err(error) => {
                let message = error.to_string();
                self.fail(self.rank, &message);
                let recorder = &mut passage.engine.recorder;
                recorder.tell(&self.options, &self.name, self.rank, &message);
            }
        }
        result
    }

    /// Returns what has been moved so far.
    pub(super) fn traffic(&self) -> Vec<Traffic> {
        self.lock().traffic.read()
    }

    fn lock(&self) -> MutexGuard<'_, Engine> {
        // A panic inside an operation has recorded or will record a failure; the engine is not used afterwards.
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Passage<'_> {
    /// Sends this rank's call to all others, waits for theirs and compares them.
    ///
    /// `data` goes with the call to each rank, at most [`Group::small`] bytes; what came is in the result.
    pub(super) fn enter(&mut self, data: impl Fn(usize) -> Private) -> Result<Came> {
        let group = self.group;
        let sequence = self.engine.sequence;
        let mut calls = Requests::default();
        let (inbox, outbox) = (self.engine.inbox.lend(), self.engine.outbox.lend());
        let result = self.exchange_calls(&mut calls, (inbox, outbox), data);
        if let Err(error) = result {
            self.give_up(calls);
            return Err(error);
        }
        calls.clear();
        self.engine.sequence += 1;
        let own = (self.signature.pack(), self.signature.count);
        let others = (0..group.size).filter(|rank| *rank != group.rank);
        let theirs: Vec<_> = others.map(|rank| (rank, signature_in(&inbox.slot(rank)))).collect();
        if theirs.iter().all(|(_, call)| *call == own) {
            return Ok(Came(inbox));
        }
        let mut calls = theirs;
        calls.insert(group.rank, (group.rank, own));
        let told = calls
            .into_iter()
            .map(|(rank, (word, count))| (rank, announced(word, count)));
        Err(self.mismatch(sequence, told))
    }

    fn exchange_calls(
        &mut self,
        calls: &mut Requests,
        (inbox, outbox): (Lent, Lent),
        data: impl Fn(usize) -> Private,
    ) -> Result<()> {
        let (group, library) = (self.group, self.group.library);
        let others = || (0..group.size).filter(|rank| *rank != group.rank);
        for peer in others() {
            calls.receive(library, group.channel, inbox.slot(peer), peer, CALL)?;
        }
        for peer in others() {
            let message = written(&outbox.slot(peer), &self.signature, &data(peer));
            calls.send(library, group.channel, message, peer, CALL)?;
        }
        self.wait_for_calls(calls)
    }

    /// Leaves calls and their memory to MPI, which may hold both for as long as the process lives.
    pub(super) fn give_up(&mut self, mut requests: Requests) {
        requests.cancel_receives(self.group.library);
        std::mem::forget(requests);
        self.engine.inbox.give_up();
        self.engine.outbox.give_up();
    }

    /// Describes the operation for messages.
    pub(super) fn describe(&self) -> String {
        format!(
            "{} (operation {} of {})",
            self.signature, self.engine.sequence, self.group.name
        )
    }

    /// Returns the number of the next collective.
    pub(super) fn sequence(&self) -> u64 {
        self.engine.sequence
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
}

/// What came with the calls of an operation; stays until the next.
#[derive(Debug)]
pub(super) struct Came(Lent);

impl Came {
    /// Returns the first `bytes` of the data from `rank`.
    pub(super) fn from(&self, rank: usize, bytes: usize) -> Private {
        data_in(&self.0.slot(rank), bytes)
    }
}

/// Writes a signature and data into a slot; returns what of it is to be sent.
pub(super) fn written(slot: &Private, signature: &Signature, data: &Private) -> Private {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&signature.pack().to_le_bytes());
    header[8..16].copy_from_slice(&signature.count.to_le_bytes());
    slot.part(0..HEADER).copy_between(&Private::of(&header));
    data_in(slot, data.len()).copy_between(data);
    slot.part(0..HEADER + data.len())
}

/// Returns the first `bytes` of the data in a slot.
pub(super) fn data_in(slot: &Private, bytes: usize) -> Private {
    slot.part(HEADER..HEADER + bytes)
}

/// Reads the signature, packed, and the count in a slot.
pub(super) fn signature_in(slot: &Private) -> (u64, u64) {
    let mut words = [0u64; 2];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
    Private::of_mut(bytes).copy_between(&slot.part(0..16));
    (u64::from_le(words[0]), u64::from_le(words[1]))
}

/// Returns the bytes of the longest call of a group.
pub(super) fn longest_call(group: &Group) -> usize {
    HEADER + group.small
}

/// Describes a call.
pub(super) fn announced(word: u64, count: u64) -> String {
    Signature::unpack(word, count).map_or_else(|| "an unknown operation".into(), |signature| signature.to_string())
}
