//! What the server holds: keys with values, barriers, and who waits for them.
//!
//! Sockets do not appear here. Everything lies under one lock; whoever waits does so on a condition variable of the key
//! or barrier concerned, so that a change wakes only those it concerns.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::protocol::Response;

/// Most bytes in all keys and values together.
const MOST_BYTES: usize = 1 << 30;
/// Most keys.
const MOST_KEYS: usize = 1 << 18;
/// How often a waiting thread looks whether its client is still there.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// The shared state of one store.
pub(super) struct Entries {
    state: Mutex<State>,
    most_bytes: usize,
    most_keys: usize,
    look_interval: Duration,
}

#[derive(Default)]
struct State {
    values: HashMap<Vec<u8>, Arc<Vec<u8>>>,
    /// Of all keys and values.
    bytes: usize,
    waiting: HashMap<Vec<u8>, Waiting>,
    rounds: HashMap<Vec<u8>, Round>,
    next_round: u64,
    closed: bool,
}

/// Who waits for one key to be set.
#[derive(Default)]
struct Waiting {
    set: Arc<Condvar>,
    count: usize,
}

/// One use of a barrier, from the first that arrives until all came or the last withdrew.
struct Round {
    number: u64,
    size: u64,
    arrived: u64,
    /// The most that were here at one time: what a time-out reports, also to those that give up a moment later.
    most: u64,
    complete: Arc<Condvar>,
}

/// Nobody is there any more to take an answer: the client left or the store is closing.
#[derive(Debug)]
pub(super) struct Abandoned;

impl Entries {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::default(),
            most_bytes: MOST_BYTES,
            most_keys: MOST_KEYS,
            look_interval: LOOK_INTERVAL,
        }
    }

    /// Makes all waits, present and future, end.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.waiting.values().for_each(|waiting| waiting.set.notify_all());
        state.rounds.values().for_each(|round| round.complete.notify_all());
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    pub(super) fn set(&self, key: &[u8], value: &[u8]) -> Response {
        match self.insert(&mut self.lock(), key, value.to_vec()) {
            Ok(()) => Response::Done,
            Err(reason) => Response::Refused(reason),
        }
    }

    pub(super) fn get(&self, key: &[u8]) -> Response {
        match self.lock().values.get(key) {
            Some(value) => Response::Value(value.clone()),
            None => Response::Absent,
        }
    }

    /// Adds to a counter, which is eight little-endian bytes; an absent one counts as 0.
    pub(super) fn add(&self, key: &[u8], amount: i64) -> Response {
        let mut state = self.lock();
        let old = match state.values.get(key).map(|value| <[u8; 8]>::try_from(&value[..])) {
            None => 0,
            Some(Ok(bytes)) => i64::from_le_bytes(bytes),
            Some(Err(_)) => return Response::Refused("the key holds a value that `add` did not make".to_owned()),
        };
        let Some(new) = old.checked_add(amount) else {
            return Response::Refused(format!("{old} + {amount} does not fit 64 bits"));
        };
        match self.insert(&mut state, key, new.to_le_bytes().to_vec()) {
            Ok(()) => Response::Integer(new),
            Err(reason) => Response::Refused(reason),
        }
    }

    pub(super) fn compare_and_set(&self, key: &[u8], expected: Option<&[u8]>, value: &[u8]) -> Response {
        let mut state = self.lock();
        if state.values.get(key).map(|value| &value[..]) != expected {
            return Response::Flag(false);
        }
        match self.insert(&mut state, key, value.to_vec()) {
            Ok(()) => Response::Flag(true),
            Err(reason) => Response::Refused(reason),
        }
    }

    pub(super) fn delete(&self, key: &[u8]) -> Response {
        let mut state = self.lock();
        let removed = state.values.remove(key);
        if let Some(value) = &removed {
            state.bytes -= key.len() + value.len();
        }
        Response::Flag(removed.is_some())
    }

    /// Waits until the key is set.
    pub(super) fn wait(
        &self,
        key: &[u8],
        deadline: Instant,
        is_client_there: impl Fn() -> bool,
    ) -> Result<Response, Abandoned> {
        let mut state = self.lock();
        if let Some(value) = state.values.get(key) {
            return Ok(Response::Value(value.clone()));
        }
        let waiting = state.waiting.entry(key.to_vec()).or_default();
        waiting.count += 1;
        let set = waiting.set.clone();
        let (mut state, end) = self.sleep_until(state, &set, deadline, is_client_there, |state| {
            state.values.get(key).map(|value| Response::Value(value.clone()))
        });
        if let Some(waiting) = state.waiting.get_mut(key) {
            waiting.count -= 1;
            if waiting.count == 0 {
                state.waiting.remove(key);
            }
        }
        match end {
            End::Come(response) => Ok(response),
            End::TimedOut => Ok(Response::TimedOut { came: 0 }),
            End::Abandoned => Err(Abandoned),
        }
    }

    /// Arrives at a barrier and waits until `size` callers have.
    pub(super) fn barrier(
        &self,
        name: &[u8],
        size: u64,
        deadline: Instant,
        is_client_there: impl Fn() -> bool,
    ) -> Result<Response, Abandoned> {
        if size == 0 {
            return Ok(Response::Refused(
                "a barrier of size 0; it needs at least one".to_owned(),
            ));
        }
        let mut guard = self.lock();
        let state = &mut *guard;
        let next_round = &mut state.next_round;
        let round = state.rounds.entry(name.to_vec()).or_insert_with(|| {
            *next_round += 1;
            Round {
                number: *next_round,
                size,
                arrived: 0,
                most: 0,
                complete: Arc::default(),
            }
        });
        if round.size != size {
            return Ok(Response::Refused(format!(
                "this caller says the barrier has size {size}, one that waits says {}",
                round.size
            )));
        }
        round.arrived += 1;
        round.most = round.most.max(round.arrived);
        let (number, complete) = (round.number, round.complete.clone());
        if round.arrived == size {
            state.rounds.remove(name);
            complete.notify_all();
            return Ok(Response::Done);
        }
        // A round with somebody in it is removed only when it is complete.
        let (mut state, end) = self.sleep_until(guard, &complete, deadline, is_client_there, |state| {
            let still_open = state.rounds.get(name).is_some_and(|round| round.number == number);
            (!still_open).then_some(Response::Done)
        });
        if let End::Come(response) = end {
            return Ok(response);
        }
        let mut came = 0;
        if let Some(round) = state.rounds.get_mut(name) {
            came = round.most;
            round.arrived -= 1;
            if round.arrived == 0 {
                state.rounds.remove(name);
            }
        }
        match end {
            End::Abandoned => Err(Abandoned),
            _ => Ok(Response::TimedOut { came }),
        }
    }

    fn insert(&self, state: &mut State, key: &[u8], value: Vec<u8>) -> Result<(), String> {
        let old = state.values.get(key).map(|value| key.len() + value.len());
        let bytes = state.bytes - old.unwrap_or(0) + key.len() + value.len();
        if bytes > self.most_bytes {
            return Err(format!(
                "the store is full: it holds at most {} bytes; delete what is done with",
                self.most_bytes
            ));
        }
        if old.is_none() && state.values.len() >= self.most_keys {
            return Err(format!(
                "the store is full: it holds at most {} keys; delete what is done with",
                self.most_keys
            ));
        }
        state.bytes = bytes;
        state.values.insert(key.to_vec(), Arc::new(value));
        if let Some(waiting) = state.waiting.get(key) {
            waiting.set.notify_all();
        }
        Ok(())
    }

    /// Sleeps until `come` finds what it looks for. What has come counts even if the deadline passed or the store closes:
    /// the last barrier of a run must end well for every rank although the host of the store leaves right after it.
    fn sleep_until<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        change: &Condvar,
        deadline: Instant,
        is_client_there: impl Fn() -> bool,
        come: impl Fn(&State) -> Option<Response>,
    ) -> (MutexGuard<'a, State>, End) {
        let mut next_look = Instant::now() + self.look_interval;
        loop {
            if let Some(response) = come(&state) {
                return (state, End::Come(response));
            }
            let now = Instant::now();
            if state.closed {
                return (state, End::Abandoned);
            }
            if now >= deadline {
                return (state, End::TimedOut);
            }
            if now >= next_look {
                if !is_client_there() {
                    return (state, End::Abandoned);
                }
                next_look = now + self.look_interval;
            }
            let pause = deadline.min(next_look).saturating_duration_since(now);
            state = change
                .wait_timeout(state, pause)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is complete before anything that could panic, so a poisoned state is a sound one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum End {
    Come(Response),
    TimedOut,
    Abandoned,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(20)
    }

    #[test]
    fn bytes_are_bounded_and_given_back() {
        let entries = Entries {
            most_bytes: 10,
            ..Entries::new()
        };
        assert_eq!(entries.set(b"a", &[0; 9]), Response::Done);
        assert!(matches!(entries.set(b"b", b""), Response::Refused(reason) if reason.contains("10 bytes")));
        assert_eq!(entries.set(b"a", &[0; 8]), Response::Done);
        assert_eq!(entries.set(b"b", b""), Response::Done);
        assert_eq!(entries.delete(b"a"), Response::Flag(true));
        assert_eq!(entries.set(b"b", &[0; 9]), Response::Done);
    }

    #[test]
    fn keys_are_bounded() {
        let entries = Entries {
            most_keys: 1,
            ..Entries::new()
        };
        assert_eq!(entries.add(b"a", 1), Response::Integer(1));
        assert_eq!(entries.add(b"a", 1), Response::Integer(2));
        assert!(matches!(entries.add(b"b", 1), Response::Refused(reason) if reason.contains("1 keys")));
    }

    #[test]
    fn nothing_is_left_behind_by_waits_that_end() {
        let entries = Entries::new();
        assert_eq!(
            entries.wait(b"key", soon(), || true).ok(),
            Some(Response::TimedOut { came: 0 })
        );
        assert_eq!(
            entries.barrier(b"name", 2, soon(), || true).ok(),
            Some(Response::TimedOut { came: 1 })
        );
        let far = Instant::now() + Duration::from_secs(60);
        assert!(entries.wait(b"key", far, || false).is_err());
        assert!(entries.barrier(b"name", 2, far, || false).is_err());
        let state = entries.lock();
        assert!(state.waiting.is_empty() && state.rounds.is_empty());
    }

    #[test]
    fn a_change_wakes_those_that_wait_for_it() {
        let entries = Entries {
            look_interval: Duration::from_secs(3600),
            ..Entries::new()
        };
        let far = Instant::now() + Duration::from_secs(30);
        std::thread::scope(|scope| {
            let key = scope.spawn(|| entries.wait(b"key", far, || true));
            let barrier = scope.spawn(|| entries.barrier(b"name", 2, far, || true));
            let left = scope.spawn(|| entries.wait(b"never", far, || true));
            while entries.lock().waiting.len() < 2 || entries.lock().rounds.is_empty() {
                std::thread::yield_now();
            }
            assert_eq!(entries.set(b"key", b"x"), Response::Done);
            assert_eq!(key.join().unwrap().ok(), Some(Response::Value(Arc::new(b"x".to_vec()))));
            assert_eq!(entries.barrier(b"name", 2, far, || true).ok(), Some(Response::Done));
            assert_eq!(barrier.join().unwrap().ok(), Some(Response::Done));
            entries.close();
            assert!(left.join().unwrap().is_err());
        });
    }

    #[test]
    fn a_complete_barrier_ends_well_although_the_store_closes() {
        let entries = Entries::new();
        let far = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            let first = scope.spawn(|| entries.barrier(b"end", 2, far, || true));
            while entries.lock().rounds.is_empty() {
                std::thread::yield_now();
            }
            assert_eq!(entries.barrier(b"end", 2, far, || true).ok(), Some(Response::Done));
            entries.close();
            assert_eq!(first.join().unwrap().ok(), Some(Response::Done));
        });
        assert!(entries.barrier(b"end", 2, far, || true).is_err());
    }
}
