//! What ranks tell each other through the store: their calls, that they failed, that they left.
//!
//! Call number n of rank r is the key `.../call/n/r`. A rank that fails or leaves writes so in the place of its next call:
//! who waits for that call learns it, and who has the calls of all ranks goes on; a rank that gives up waiting for calls
//! takes its own back. A failure also has a key of its own,
//! which is looked at while NCCL moves data. A rank that has read all calls n knows that everyone is done with calls
//! n - 1, and takes its own away.

use crate::collective::Signature;
use crate::store::StoreClient;
use crate::{Error, Result};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long the store is asked to wait in one go, after which a rank looks around.
const SLICE: Duration = Duration::from_millis(100);

/// First byte of what is in the place of a call.
const CALL: u8 = 0;
const FAILED: u8 = 1;
const LEFT: u8 = 2;

/// One rank's place among what the ranks of a group tell each other.
#[derive(Debug)]
pub(super) struct Board {
    store: StoreClient,
    /// Begins the keys of this group.
    pub(super) prefix: String,
    pub(super) name: String,
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) timeout: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The number of the next call.
    next: u64,
    /// The call whose like from other ranks is still waited for.
    entering: Option<u64>,
    has_left: bool,
    failure: Option<(usize, String)>,
    /// How many messages went to each rank, and came from it.
    sent: Vec<u64>,
    received: Vec<u64>,
}

/// What stands in the place of a call.
#[derive(Debug)]
enum Told {
    Call(Call),
    Failed(usize, String),
    Left,
}

/// A rank's call: its signature, packed, and what it adds to it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Call {
    word: u64,
    count: u64,
    more: Vec<u8>,
}

impl Board {
    pub(super) fn new(
        store: StoreClient,
        prefix: String,
        name: String,
        (rank, size): (usize, usize),
        timeout: Duration,
    ) -> Self {
        let state = State {
            next: 0,
            entering: None,
            has_left: false,
            failure: None,
            sent: vec![0; size],
            received: vec![0; size],
        };
        Self {
            store,
            prefix,
            name,
            rank,
            size,
            timeout,
            state: Mutex::new(state),
        }
    }

    /// Makes the board of a sub-group, with keys of its own.
    pub(super) fn of_sub_group(&self, number: u32, color: i64, place: (usize, usize)) -> Self {
        let (prefix, name) = (&self.prefix, &self.name);
        let prefix = format!("{prefix}/{number}.{color}");
        let name = format!("{name}/{number}.{color}");
        Self::new(self.store.again(), prefix, name, place, self.timeout)
    }

    /// Enters the next collective with all ranks, and compares their calls; returns what each added to its own.
    ///
    /// # Errors
    /// [`Error::Mismatch`] on all ranks, [`Error::Timeout`] naming those that did not come; a failed or absent rank.
    pub(super) fn enter(&self, signature: Signature, more: &[u8]) -> Result<Vec<Vec<u8>>> {
        let own = Call {
            word: signature.pack(),
            count: signature.count,
            more: more.to_vec(),
        };
        let number = {
            let mut state = self.lock();
            state.check()?;
            let number = state.next;
            self.store.set(&self.call_key(number, self.rank), &own.encode())?;
            state.next += 1;
            state.entering = Some(number);
            number
        };
        let start = Instant::now();
        let mut calls = Vec::with_capacity(self.size);
        for rank in 0..self.size {
            calls.push(if rank == self.rank {
                own.clone()
            } else {
                self.call_of(rank, number, signature, start)?
            });
        }
        self.lock().entering = None;
        if let Some(before) = number.checked_sub(1) {
            self.store.delete(&self.call_key(before, self.rank))?;
        }
        if calls
            .iter()
            .all(|call| (call.word, call.count) == (own.word, own.count))
        {
            return Ok(calls.into_iter().map(|call| call.more).collect());
        }
        let calls = calls.iter().enumerate().map(|(rank, call)| (rank, call.to_string()));
        Err(self.mismatch(number, calls))
    }

    fn call_of(&self, rank: usize, number: u64, signature: Signature, start: Instant) -> Result<Call> {
        let operation = || format!("{signature} (operation {number} of {})", self.name);
        loop {
            if let Some(told) = self.wait(&self.call_key(number, rank))? {
                return match Told::decode(&told) {
                    Some(Told::Call(call)) => Ok(call),
                    Some(Told::Failed(by, reason)) => Err(Error::Aborted { by, reason }),
                    _ => Err(self.lost(rank, operation())),
                };
            }
            self.check()?;
            if start.elapsed() > self.timeout {
                let mut missing = Vec::new();
                for rank in 0..self.size {
                    if self.store.get(&self.call_key(number, rank))?.is_none() {
                        missing.push(rank);
                    }
                }
                return Err(self.late(start, operation(), missing));
            }
        }
    }

    /// Agrees on a message that goes to a rank, on one that comes from a rank, or on both. Offers before it waits for the
    /// other, so that a ring of ranks does not wait for itself.
    ///
    /// # Errors
    /// As [`Board::enter`], for the ranks concerned.
    pub(super) fn agree_on_messages(
        &self,
        send: Option<(Signature, usize)>,
        receive: Option<(Signature, usize)>,
    ) -> Result<()> {
        let offered = send.map(|(signature, to)| Ok::<_, Error>((self.offer(signature, to)?, signature, to)));
        let offered = offered.transpose()?;
        if let Some((signature, from)) = receive {
            self.accept(signature, from)?;
        }
        if let Some((ready, signature, to)) = offered {
            self.wait_for_peer(&ready, to, signature)?;
            self.store.delete(&ready)?;
        }
        Ok(())
    }

    /// Offers a message; returns the key that is set when it is expected.
    fn offer(&self, signature: Signature, to: usize) -> Result<String> {
        let number = self.count_message(|state| &mut state.sent[to])?;
        let key = self.message_key(self.rank, to, number);
        let call = Call {
            word: signature.pack(),
            count: signature.count,
            more: Vec::new(),
        };
        self.store.set(&key, &call.encode())?;
        Ok(format!("{key}/ready"))
    }

    /// Waits for a message that `from` offers, compares it with what is expected, and says so.
    fn accept(&self, expected: Signature, from: usize) -> Result<()> {
        let number = self.count_message(|state| &mut state.received[from])?;
        let key = self.message_key(from, self.rank, number);
        let offered = Call::decode(&self.wait_for_peer(&key, from, expected)?);
        let offered = offered.ok_or_else(|| self.lost(from, expected.to_string()))?;
        // The two sides differ in the kind, as they should.
        let sent = Signature::unpack(offered.word, offered.count);
        let agree = sent.is_some_and(|sent| (sent.element, sent.count) == (expected.element, expected.count));
        if !agree {
            let calls = [(from, offered.to_string()), (self.rank, expected.to_string())];
            return Err(self.mismatch(self.lock().next, calls.into_iter()));
        }
        self.store.delete(&key)?;
        self.store.set(&format!("{key}/ready"), &[])
    }

    fn count_message(&self, counter: impl Fn(&mut State) -> &mut u64) -> Result<u64> {
        let mut state = self.lock();
        state.check()?;
        let counter = counter(&mut state);
        *counter += 1;
        Ok(*counter)
    }

    /// Waits for a key that `peer` sets before it enters its next collective.
    fn wait_for_peer(&self, key: &str, peer: usize, signature: Signature) -> Result<Vec<u8>> {
        let start = Instant::now();
        let call = self.call_key(self.lock().next, peer);
        loop {
            // In this order: a peer that is further on has set the key before.
            let told = self.store.get(&call)?;
            if let Some(value) = self.wait(key)? {
                return Ok(value);
            }
            self.check()?;
            match told.as_deref().map(Told::decode) {
                None => {}
                Some(Some(Told::Failed(by, reason))) => return Err(Error::Aborted { by, reason }),
                Some(Some(Told::Call(call))) => {
                    let calls = [(self.rank, signature.to_string()), (peer, call.to_string())];
                    return Err(self.mismatch(self.lock().next, calls.into_iter()));
                }
                Some(_) => return Err(self.lost(peer, signature.to_string())),
            }
            if start.elapsed() > self.timeout {
                return Err(self.late(start, format!("{signature} ({})", self.name), vec![peer]));
            }
        }
    }

    /// Waits a moment for a key.
    fn wait(&self, key: &str) -> Result<Option<Vec<u8>>> {
        // A wait that ends without a value is an error as others are: what the store says to `get` decides.
        self.store
            .wait(key, SLICE)
            .map_or_else(|_| self.store.get(key), |value| Ok(Some(value)))
    }

    /// Fails if the group has failed, as far as this rank knows.
    pub(super) fn check(&self) -> Result<()> {
        self.lock().check()
    }

    /// Fails if the group has failed on any rank.
    pub(super) fn look_around(&self) -> Result<()> {
        self.check()?;
        // At the end of a run the store may be gone before this rank's last operation has ended.
        match self
            .store
            .get(&self.failure_key())
            .ok()
            .flatten()
            .as_deref()
            .map(Told::decode)
        {
            Some(Some(Told::Failed(by, reason))) => Err(Error::Aborted { by, reason }),
            _ => Ok(()),
        }
    }

    /// Makes this rank's next operation, and those of the others, fail with `reason`, which began on rank `by`.
    pub(super) fn fail(&self, by: usize, reason: &str) {
        let mut state = self.lock();
        if state.failure.is_some() {
            return;
        }
        state.failure = Some((by, reason.to_owned()));
        let told = Told::Failed(by, reason.to_owned()).encode();
        // A store that is gone is noticed by the others too.
        let _ = self.store.set(&self.failure_key(), &told);
        let _ = self.store.set(&self.call_key(state.next, self.rank), &told);
        // A rank that gives up waiting takes its call back: who comes later must not go on without it.
        if let Some(number) = state.entering.take() {
            let _ = self.store.set(&self.call_key(number, self.rank), &told);
        }
    }

    /// Tells the others that this rank comes no more.
    pub(super) fn leave(&self) {
        let mut state = self.lock();
        if state.failure.is_some() || std::mem::replace(&mut state.has_left, true) {
            return;
        }
        let _ = self.store.set(&self.call_key(state.next, self.rank), &[LEFT]);
    }

    fn call_key(&self, number: u64, rank: usize) -> String {
        format!("{}/call/{number}/{rank}", self.prefix)
    }

    fn message_key(&self, from: usize, to: usize, number: u64) -> String {
        format!("{}/message/{from}.{to}/{number}", self.prefix)
    }

    fn failure_key(&self) -> String {
        format!("{}/failure", self.prefix)
    }

    pub(super) fn mismatch(&self, sequence: u64, calls: impl Iterator<Item = (usize, String)>) -> Error {
        let calls: Vec<_> = calls.map(|(rank, call)| format!("rank {rank}: {call}")).collect();
        Error::Mismatch {
            sequence,
            group: self.name.clone(),
            calls: calls.join("; "),
        }
    }

    fn lost(&self, peer: usize, operation: String) -> Error {
        Error::PeerLost {
            rank: self.rank,
            peer,
            reason: "left the group",
            operation,
        }
    }

    fn late(&self, start: Instant, operation: String, missing: Vec<usize>) -> Error {
        Error::Timeout {
            rank: self.rank,
            seconds: start.elapsed().as_secs_f64(),
            operation,
            missing,
        }
    }

    /// Returns the number of the next collective.
    pub(super) fn next(&self) -> u64 {
        self.lock().next
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing here panics while holding the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn check(&self) -> Result<()> {
        match &self.failure {
            Some((by, reason)) => Err(Error::Aborted {
                by: *by,
                reason: reason.clone(),
            }),
            None => Ok(()),
        }
    }
}

impl Call {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![CALL];
        bytes.extend(self.word.to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
        bytes.extend(&self.more);
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.strip_prefix(&[CALL])?;
        let (word, bytes) = bytes.split_first_chunk()?;
        let (count, more) = bytes.split_first_chunk()?;
        Some(Self {
            word: u64::from_le_bytes(*word),
            count: u64::from_le_bytes(*count),
            more: more.to_vec(),
        })
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match Signature::unpack(self.word, self.count) {
            Some(signature) => signature.fmt(f),
            None => f.write_str("an unknown operation"),
        }
    }
}

impl Told {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Call(call) => call.encode(),
            Self::Failed(by, reason) => {
                let mut bytes = vec![FAILED];
                bytes.extend((*by as u64).to_le_bytes());
                bytes.extend(reason.as_bytes());
                bytes
            }
            Self::Left => vec![LEFT],
        }
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        match bytes.split_first()? {
            (&CALL, _) => Call::decode(bytes).map(Self::Call),
            (&FAILED, bytes) => {
                let (by, reason) = bytes.split_first_chunk()?;
                let reason = String::from_utf8_lossy(reason).into_owned();
                Some(Self::Failed(u64::from_le_bytes(*by) as usize, reason))
            }
            (&LEFT, _) => Some(Self::Left),
            _ => None,
        }
    }
}
