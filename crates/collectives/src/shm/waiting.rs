//! Waiting for a word of the segment to change: spin, then yield, then sleep.
//!
//! Spinning is right while every rank has a core; yielding lets oversubscribed ranks take turns; only sleeping on a
//! futex makes long waits free. A sleeper wakes every [`CHECK_EVERY`] to look after its peers and the deadline.

use super::layout::Control;
use crate::Result;
use rustix::thread::{Timespec, futex, sched_yield};
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

/// How long a sleeper sleeps before it looks after its peers.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// Looks at a word between announcing and waking.
const GLANCES: u32 = 100;

/// How patiently to wait at each stage.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    spins: u32,
    yields: u32,
}

impl Patience {
    /// For a caller with nothing else to do, in a group of `ranks` on this host.
    pub(super) fn of_caller(ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if ranks <= cores {
            // Some 100 µs; longer would only take the core from a peer when other programs hold the rest.
            Self {
                spins: 2000,
                yields: 100,
            }
        } else {
            Self::behind()
        }
    }

    /// For work behind other work, which should not take its core.
    pub(super) fn behind() -> Self {
        Self { spins: 50, yields: 100 }
    }
}

/// Publishes a new value of `word` to whoever waits for it.
pub(super) fn publish(control: &Control, word: &AtomicU32, value: u32) {
    announce(word, value);
    wake_sleepers(control, word);
}

/// Makes a new value of `word` visible; [`wake_sleepers`] must follow before this rank sleeps or leaves the operation.
///
/// The two are apart so that a rank can look for its peers while its own store is still on its way.
pub(super) fn announce(word: &AtomicU32, value: u32) {
    word.store(value, Ordering::Release);
}

/// Wakes who sleeps on `word`, after [`announce`].
pub(super) fn wake_sleepers(control: &Control, word: &AtomicU32) {
    // With the sleeper's increment and re-read, which are sequentially consistent: either it sees the announced value,
    // or this sees it asleep.
    fence(Ordering::SeqCst);
    if control.sleepers.0.load(Ordering::SeqCst) != 0 {
        let _ = futex::wake(word, futex::Flags::empty(), u32::MAX >> 1);
    }
}

/// Spins briefly until `ready` holds for `word`; says whether it does.
pub(super) fn glance(word: &AtomicU32, ready: impl Fn(u32) -> bool) -> bool {
    for _ in 0..GLANCES {
        // No pause: it would cost more than a line takes to come over.
        if ready(word.load(Ordering::Acquire)) {
            return true;
        }
    }
    false
}

/// Waits until `ready` holds for `word`; calls `check` now and then with the time waited so far.
///
/// # Errors
/// Whatever `check` returns.
pub(super) fn wait(
    control: &Control,
    word: &AtomicU32,
    patience: Patience,
    ready: impl Fn(u32) -> bool,
    mut check: impl FnMut(Duration) -> Result<()>,
) -> Result<()> {
    for _ in 0..patience.spins {
        if ready(word.load(Ordering::Acquire)) {
            return Ok(());
        }
        std::hint::spin_loop();
    }
    for _ in 0..patience.yields {
        if ready(word.load(Ordering::Acquire)) {
            return Ok(());
        }
        sched_yield();
    }
    let start = Instant::now();
    loop {
        let seen = word.load(Ordering::Acquire);
        if ready(seen) {
            return Ok(());
        }
        check(start.elapsed())?;
        sleep(control, word, seen, CHECK_EVERY);
    }
}

/// Sleeps for a millisecond at most while `word` is `seen`.
pub(super) fn nap(control: &Control, word: &AtomicU32, seen: u32) {
    sleep(control, word, seen, Duration::from_millis(1));
}

fn sleep(control: &Control, word: &AtomicU32, seen: u32, most: Duration) {
    control.sleepers.0.fetch_add(1, Ordering::SeqCst);
    if word.load(Ordering::SeqCst) == seen {
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: most.as_nanos() as _,
        };
        // Woken, timed out, interrupted or changed meanwhile: in every case the caller looks again.
        let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&timeout));
    }
    control.sleepers.0.fetch_sub(1, Ordering::SeqCst);
}
