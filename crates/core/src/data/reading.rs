//! Reading an epoch: from items that come one after another to batches that are made.

use super::rounds::{Deal, Rounds};
use super::{BatchSampler, DataError, Sampler};
use candle_core::Device;
use sconce_zero::RandomState;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// What decides the order of samples that can be reached by number.
#[derive(Debug, Clone)]
pub(super) enum Sampling {
    /// Every sample once, shuffled or not.
    Whole { shuffle: bool },
    /// As the program's sampler says.
    Samples(Arc<dyn Sampler>),
    /// As the program's own batches are.
    Batches(Arc<dyn BatchSampler>),
}

/// What is to be read: an epoch, and whose part of it.
#[derive(Debug, Clone)]
pub struct Reading {
    pub(super) sampling: Sampling,
    pub(super) seed: u64,
    pub(super) epoch: u64,
    pub(super) deal: Deal,
    /// The ranks whose batches are made here.
    pub(super) ranks: Range<usize>,
    /// How many rounds are passed over.
    pub(super) skip: usize,
    pub(super) device: Device,
}

/// What is known of a batch, beside its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BatchFacts {
    /// Rows of the batch.
    pub(crate) rows: usize,
    /// Rows at its front that no rank had before in this epoch.
    pub(crate) fresh: usize,
    /// Such rows over all ranks.
    pub(crate) fresh_together: usize,
    /// Whether it is the last of its epoch on this rank.
    pub(crate) last: bool,
    /// Whether every rank has a batch in this step.
    pub(crate) complete: bool,
}

/// A batch for one rank.
#[derive(Debug)]
pub struct MadeBatch<B> {
    pub(super) batch: Result<B, DataError>,
    pub(super) facts: BatchFacts,
}

/// The rounds of an epoch, each with a batch for every rank that was asked for.
pub(super) type MadeRounds<B> = Box<dyn Iterator<Item = Vec<MadeBatch<B>>> + Send>;

impl Reading {
    /// Deals items and makes batches of them, reading only as the result is asked for.
    ///
    /// What is random in reading and making follows from seed, epoch and place alone, not from the thread it is done on
    /// or from what was passed over.
    pub(super) fn rounds<T: Clone + Send + 'static, B: 'static>(
        self,
        items: impl Iterator<Item = Result<T, DataError>> + Send + 'static,
        rows: fn(&T) -> usize,
        make: impl Fn(Vec<T>, &Device) -> Result<B, DataError> + Send + 'static,
    ) -> MadeRounds<B> {
        // The same on all ranks: they may read the same stream.
        let mut random = RandomState {
            seed: random_key(self.seed, self.epoch),
            draws: 0,
        };
        let mut rounds = Rounds::new(items, self.deal, self.ranks.clone(), rows).enumerate();
        let mut skip = self.skip;
        Box::new(std::iter::from_fn(move || {
            let (number, round) = with_state(&mut random, || rounds.nth(std::mem::take(&mut skip)))?;
            let facts = BatchFacts {
                rows: 0,
                fresh: 0,
                fresh_together: round.fresh,
                last: round.last,
                complete: round.complete,
            };
            let parts = match round.parts {
                Ok(parts) => parts,
                Err(error) => {
                    let failed = |error| MadeBatch {
                        batch: Err(error),
                        facts,
                    };
                    let text = error.to_string();
                    let others = self.ranks.clone().skip(1).map(|_| failed(text.clone().into()));
                    return Some(others.chain([failed(error)]).collect());
                }
            };
            let of_rank = |(rank, part): (usize, super::rounds::Part<T>)| {
                let seed = random_key(RandomState::seed_of_rank(self.seed, rank), self.epoch);
                let random = RandomState {
                    seed: random_key(seed, number as u64),
                    draws: 0,
                };
                let of = |items: &[T]| items.iter().map(rows).sum();
                let facts = BatchFacts {
                    rows: of(&part.items),
                    fresh: of(&part.items[..part.fresh]),
                    ..facts
                };
                MadeBatch {
                    batch: random.during(|| make(part.items, &self.device)),
                    facts,
                }
            };
            Some(self.ranks.clone().zip(parts).map(of_rank).collect())
        }))
    }
}

/// Does `work` from a random state on, and keeps where it ends.
fn with_state<R>(state: &mut RandomState, work: impl FnOnce() -> R) -> R {
    let (result, after) = state.during(|| (work(), RandomState::current()));
    *state = after;
    result
}

/// Returns key `number` of a seed.
fn random_key(seed: u64, number: u64) -> u64 {
    RandomState { seed, draws: number }.during(RandomState::draw_key)
}
