//! Where a loader stands, shared with what saves it.

use super::LoaderState;
use crate::checkpoint::Stateful;
use crate::{Error, Result};
use serde_json::Value;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Where a loader stands.
#[derive(Debug)]
pub(crate) struct LoaderPosition {
    progress: Mutex<Progress>,
    samples_per_step: usize,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    /// The epoch of the next loop.
    pub(super) epoch: u64,
    /// Batches that the next loop passes over.
    pub(super) skip: usize,
    pub(super) seed: u64,
    /// Epoch and batches given of the loop that was begun last, until it has ended.
    pub(super) open: Option<(u64, usize)>,
}

impl LoaderPosition {
    pub(super) fn new(seed: u64, samples_per_step: usize) -> Self {
        let progress = Progress {
            epoch: 0,
            skip: 0,
            seed,
            open: None,
        };
        Self {
            progress: Mutex::new(progress),
            samples_per_step,
        }
    }

    pub(super) fn progress(&self) -> MutexGuard<'_, Progress> {
        // Nothing is left half done in there.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> LoaderState {
        let progress = *self.progress();
        let (epoch, batches) = progress.open.unwrap_or((progress.epoch, progress.skip));
        LoaderState {
            epoch,
            batches,
            seed: progress.seed,
            samples_per_step: self.samples_per_step,
        }
    }

    pub(super) fn restore(&self, state: LoaderState) -> Result<()> {
        let own = self.samples_per_step;
        // Other numbers of ranks see the same samples in other steps.
        let seen = state.batches.saturating_mul(state.samples_per_step);
        // Of unknown steps nothing is known but that none were taken.
        let unknown = state.samples_per_step == 0 && state.batches > 0;
        if unknown || !seen.is_multiple_of(own) {
            let reason = format!(
                "the state was taken after {} steps of {} samples (or batches, with a batch sampler) of all ranks together, \
                 which is no whole number of steps of {own}; resume with the same batch size times number of ranks, or \
                 where an epoch begins",
                state.batches, state.samples_per_step
            );
            return Err(Error::Loader { reason });
        }
        *self.progress() = Progress {
            epoch: state.epoch,
            skip: seen / own,
            seed: state.seed,
            open: None,
        };
        Ok(())
    }
}

impl Stateful for LoaderPosition {
    fn state(&self) -> Result<Value, Box<dyn std::error::Error + Send + Sync>> {
        Ok(serde_json::to_value(self.state())?)
    }

    fn restore(&self, state: Value) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(self.restore(serde_json::from_value(state)?)?)
    }
}
