//! Where a loader stands, small enough to be saved and put back.

use serde::{Deserialize, Serialize};

/// Where a loader stands within its epochs: what a checkpoint keeps of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoaderState {
    /// The epoch, from 0.
    pub epoch: u64,
    /// How many of its batches this rank was given, the same number on every rank.
    pub batches: usize,
    /// The seed by which it shuffles.
    pub seed: u64,
    /// How many samples all ranks get together in a step; with a batch sampler, how many batches.
    pub samples_per_step: usize,
}
