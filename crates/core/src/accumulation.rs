//! Where a loop stands within its gradient accumulation window, and which backward reduces gradients over the ranks.

use crate::data::BatchFacts;
use crate::settings::Synchronisation;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The state of gradient accumulation, shared by accelerator, optimizer, scheduler and loader.
///
/// A window has `steps` micro-batches; the last batch of a loader ends it early, unless
/// [`Synchronisation::with_dataloader`] says otherwise. A loop that is left by `break` leaves its window open: the next loop
/// goes on in it.
#[derive(Debug)]
pub struct Accumulation {
    steps: u64,
    rules: Synchronisation,
    begun: AtomicU64,
    last_of_loader: AtomicBool,
    synchronises: AtomicBool,
    announced: AtomicBool,
    /// How many scopes are open in which gradients stay local.
    local_scopes: AtomicUsize,
    /// Whether the next backward reduces whatever else holds.
    is_triggered: AtomicBool,
    /// What this rank's losses are multiplied with, as the bits of an f64.
    weight: AtomicU64,
    /// The batch that the innermost loop over a loader is at.
    batch: Mutex<Option<BatchFacts>>,
}

impl Accumulation {
    /// Makes the state for windows of `steps` micro-batches.
    pub fn new(steps: u64, rules: Synchronisation) -> Self {
        Self {
            steps: steps.max(1),
            rules,
            begun: AtomicU64::new(0),
            last_of_loader: AtomicBool::new(false),
            synchronises: AtomicBool::new(true),
            announced: AtomicBool::new(false),
            local_scopes: AtomicUsize::new(0),
            is_triggered: AtomicBool::new(false),
            weight: AtomicU64::new(1f64.to_bits()),
            batch: Mutex::new(None),
        }
    }

    /// Returns the number of micro-batches in a window.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Says whether the current micro-batch ends its window.
    pub fn synchronises(&self) -> bool {
        self.synchronises.load(Relaxed)
    }

    /// Returns what this rank's losses are multiplied with: 1, but for ranks with different numbers of inputs; 0 where this
    /// rank's own have ended.
    pub fn weight(&self) -> f64 {
        f64::from_bits(self.weight.load(Relaxed))
    }

    pub(crate) fn weigh(&self, weight: f64) {
        self.weight.store(weight.to_bits(), Relaxed);
    }

    pub(crate) fn begin_micro_batch(&self) {
        let begun = if self.rules.with_dataloader && self.last_of_loader.load(Relaxed) {
            // The window ends here; the next loader starts a new one.
            self.begun.store(0, Relaxed);
            self.steps
        } else {
            self.begun.fetch_add(1, Relaxed) + 1
        };
        self.synchronises.store(begun % self.steps == 0, Relaxed);
        self.announced.store(true, Relaxed);
    }

    /// Says whether the backward that begins reduces gradients over the ranks; a trigger holds for one.
    pub(crate) fn take_reduction(&self) -> bool {
        let is_triggered = self.is_triggered.swap(false, Relaxed);
        let is_local = self.local_scopes.load(Relaxed) > 0;
        is_triggered || (!is_local && (self.rules.each_batch || self.synchronises()))
    }

    /// Makes the next backward reduce gradients.
    pub(crate) fn trigger(&self) {
        self.is_triggered.store(true, Relaxed);
    }

    /// Keeps gradients on this rank as long as what is returned lives.
    pub(crate) fn stay_local(&self) -> LocalScope<'_> {
        self.local_scopes.fetch_add(1, Relaxed);
        LocalScope(self)
    }

    /// Begins a loop over a loader; loops may lie within each other, as an evaluation within training.
    pub(crate) fn enter_loader(&self) -> OuterLoop {
        OuterLoop {
            last_of_loader: self.last_of_loader.swap(false, Relaxed),
            announced: self.announced.swap(false, Relaxed),
            batch: self.batch().take(),
        }
    }

    /// Notes that a loader gives its next batch, which must be announced anew.
    pub(crate) fn begin_batch(&self, batch: BatchFacts) {
        self.last_of_loader.store(batch.last, Relaxed);
        self.announced.store(false, Relaxed);
        *self.batch() = Some(batch);
    }

    /// Does what [`Accumulation::begin_batch`] does with an input that may be no loader's.
    pub(crate) fn begin_input(&self, batch: Option<BatchFacts>, last: bool) {
        self.last_of_loader.store(last, Relaxed);
        self.announced.store(false, Relaxed);
        *self.batch() = batch;
    }

    /// Returns what is known of the batch that the innermost loop over a loader is at.
    pub(crate) fn current_batch(&self) -> Option<BatchFacts> {
        *self.batch()
    }

    fn batch(&self) -> MutexGuard<'_, Option<BatchFacts>> {
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a loader has no more batches.
    pub(crate) fn end_batches(&self) {
        *self.batch() = None;
    }

    /// Ends the loop over a loader that `enter_loader` began.
    pub(crate) fn leave_loader(&self, outer: OuterLoop) {
        self.last_of_loader.store(outer.last_of_loader, Relaxed);
        self.announced.store(outer.announced, Relaxed);
        *self.batch() = outer.batch;
    }

    pub(crate) fn is_announced(&self) -> bool {
        self.steps == 1 || self.announced.load(Relaxed)
    }
}

/// As long as it lives, gradients stay on this rank.
#[derive(Debug)]
pub(crate) struct LocalScope<'a>(&'a Accumulation);

impl Drop for LocalScope<'_> {
    fn drop(&mut self) {
        self.0.local_scopes.fetch_sub(1, Relaxed);
    }
}

/// Where the loop around a loop over a loader stands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OuterLoop {
    last_of_loader: bool,
    announced: bool,
    batch: Option<BatchFacts>,
}

#[cfg(test)]
mod tests {
    use super::{Accumulation, Synchronisation};
    use crate::data::BatchFacts;

    fn batch(last: bool) -> BatchFacts {
        BatchFacts {
            rows: 1,
            fresh: 1,
            fresh_together: 1,
            last,
            complete: true,
        }
    }

    #[test]
    fn every_nth_micro_batch_and_the_last_of_a_loader_end_a_window() {
        let accumulation = Accumulation::new(3, Synchronisation::default());
        let mut flags = Vec::new();
        for _epoch in 0..2 {
            for batch in 0..5 {
                accumulation.begin_batch(self::batch(batch == 4));
                accumulation.begin_micro_batch();
                flags.push(accumulation.synchronises());
            }
        }
        let epoch = [false, false, true, false, true];
        assert_eq!(flags, [epoch, epoch].concat());
    }

    #[test]
    fn a_loop_within_a_loop_leaves_the_outer_one_where_it_stood() {
        let accumulation = Accumulation::new(2, Synchronisation::default());
        let training = accumulation.enter_loader();
        for last in [false, true] {
            accumulation.begin_batch(batch(last));
            accumulation.begin_micro_batch();
            let evaluation = accumulation.enter_loader();
            accumulation.begin_batch(batch(!last));
            assert!(!accumulation.is_announced());
            accumulation.leave_loader(evaluation);
            assert!(accumulation.is_announced());
            assert_eq!(accumulation.synchronises(), last);
        }
        accumulation.leave_loader(training);
        assert!(!accumulation.is_announced());
        accumulation.begin_micro_batch();
        assert!(!accumulation.synchronises());
    }
}
