//! How data is to be read: settings, before any rank is known.

use super::collate::Collate;
use super::dispatch::Wire;
use super::reading::Sampling;
use super::rounds::{Deal, Tail};
use super::{BatchSampler, DataError, Dataset, IterableDataset, Sampler, Source, Stream};
use crate::nested::Nested;
use crate::{Error, Result};
use candle_core::Device;
use sconce_collectives::World;
use std::sync::Arc;

/// How many batches are made ahead of the loop by default, as by one worker of PyTorch's.
const PREFETCH: usize = 2;

/// How to read a data set in batches; prepared, it serves one rank.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use sconce_core::{DataLoader, TensorDataset};
///
/// let data = TensorDataset::new(vec![Tensor::zeros((100, 3), DType::F32, &Device::Cpu)?])?;
/// let acc = sconce_core::accelerator()?;
/// let mut loader = acc.prepare_loader(DataLoader::new(data, 8).shuffle(true).drop_last(true))?;
/// for batch in &mut loader {
///     assert_eq!(batch?[0].dims(), [8, 3]);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct DataLoader<D: Source> {
    pub(super) source: D,
    pub(super) sampling: Sampling,
    batch_size: usize,
    drop_last: bool,
    split_batches: bool,
    even_batches: bool,
    pub(super) prefetch: usize,
    /// How batches travel, where rank 0 makes them for all.
    pub(super) dispatch: Option<Wire<D::Batch>>,
}

impl<D: Dataset> DataLoader<D> {
    /// Reads `batch_size` samples per rank and batch, in order.
    ///
    /// With several ranks, samples at the end that do not fill a batch on every rank are filled up from the start, so
    /// that all ranks take the same number of steps; `gather_for_metrics` counts every sample once. One rank alone gets a
    /// last batch that is short, as in PyTorch.
    pub fn new(dataset: D, batch_size: usize) -> Self {
        Self::of(dataset, batch_size)
    }

    /// Shuffles anew in every epoch, by the accelerator's seed, in the order of [`RandomSampler`](super::RandomSampler).
    #[must_use]
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.sampling = Sampling::Whole { shuffle };
        self
    }

    /// Reads the samples that a sampler chooses.
    #[must_use]
    pub fn sampler(mut self, sampler: impl Sampler + 'static) -> Self {
        self.sampling = Sampling::Samples(Arc::new(sampler));
        self
    }

    /// Reads batches that the program makes itself; the loader's batch size has no meaning then.
    #[must_use]
    pub fn batch_sampler(mut self, sampler: impl BatchSampler + 'static) -> Self {
        self.sampling = Sampling::Batches(Arc::new(sampler));
        self
    }
}

impl<S: IterableDataset<Sample: Collate<Batch: Send + 'static>>> DataLoader<Stream<S, <S::Sample as Collate>::Batch>> {
    /// Reads a stream, `batch_size` samples per rank and batch, which are [collated](Collate).
    pub fn stream(dataset: S, batch_size: usize) -> Self {
        Self::of(Stream::collating(dataset), batch_size)
    }
}

impl<S: IterableDataset, B: Send + 'static> DataLoader<Stream<S, B>> {
    /// Reads a stream, `batch_size` samples per rank and batch, which `collate` puts into a batch.
    pub fn stream_with(
        dataset: S,
        batch_size: usize,
        collate: impl Fn(Vec<S::Sample>, &Device) -> Result<B, DataError> + Send + Sync + 'static,
    ) -> Self {
        Self::of(Stream::new(dataset, collate), batch_size)
    }
}

impl<D: Source> DataLoader<D> {
    fn of(source: D, batch_size: usize) -> Self {
        Self {
            source,
            sampling: Sampling::Whole { shuffle: false },
            batch_size,
            drop_last: false,
            split_batches: false,
            even_batches: true,
            prefetch: PREFETCH,
            dispatch: None,
        }
    }

    /// Leaves out the samples at the end that do not fill a batch on every rank.
    #[must_use]
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// Makes the batch size that of all ranks together, each of which gets an equal part of a batch.
    #[must_use]
    pub fn split_batches(mut self, split_batches: bool) -> Self {
        self.split_batches = split_batches;
        self
    }

    /// Says whether samples at the end are filled up so that all ranks take the same number of steps, which is the
    /// default. Without, some ranks get a shorter last batch, or one less; what ranks do together in the loop then no
    /// longer fits, such as a backward pass.
    #[must_use]
    pub fn even_batches(mut self, even_batches: bool) -> Self {
        self.even_batches = even_batches;
        self
    }

    /// Sets how many batches are made ahead of the loop, on a thread of their own; 2 by default, 0 makes each when it is
    /// asked for. Batches and their order are the same.
    #[must_use]
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.prefetch = batches;
        self
    }

    /// Lets rank 0 alone read, and give the other ranks their batches: for streams that not every rank can read.
    ///
    /// All ranks then take every step of the loop together. A last batch that is short is spread over the ranks.
    #[must_use]
    pub fn dispatch_batches(mut self, dispatch_batches: bool) -> Self
    where
        D::Batch: Nested,
    {
        self.dispatch = dispatch_batches.then(Wire::new);
        self
    }

    /// Returns the number of samples per rank and batch, where it is one.
    pub(crate) fn samples_per_rank(&self, world: usize) -> Option<usize> {
        match self.sampling {
            Sampling::Batches(_) => None,
            _ if self.split_batches => Some(self.batch_size / world),
            _ => Some(self.batch_size),
        }
    }

    /// Returns how rounds are dealt in a world.
    ///
    /// # Errors
    /// [`Error::Loader`] for settings that do not go together or do not serve this world.
    pub(super) fn deal(&self, world: &World) -> Result<Deal> {
        let world = world.size;
        let refuse = |reason: String| Err(Error::Loader { reason });
        let own_batches = matches!(self.sampling, Sampling::Batches(_));
        if self.split_batches && own_batches {
            return refuse("split_batches needs batches of one size; leave it out with a batch sampler".into());
        }
        if self.split_batches && !self.batch_size.is_multiple_of(world) {
            let size = self.batch_size;
            return refuse(format!(
                "split_batches with a batch size of {size} on {world} ranks; expected a multiple of {world}"
            ));
        }
        if self.batch_size == 0 && !own_batches {
            return refuse("the batch size is 0; expected at least 1".into());
        }
        let dispatches = self.dispatch.is_some() && world > 1;
        if dispatches && !self.even_batches {
            return refuse(
                "dispatch_batches gives every rank a batch in every step; leave out one of it and even_batches(false)"
                    .into(),
            );
        }
        let tail = match () {
            // One rank alone reads as PyTorch does; its own batches are whole.
            () if self.drop_last && !(world == 1 && own_batches) => Tail::Drop,
            () if world == 1 || !self.even_batches => Tail::Uneven,
            () if dispatches => Tail::Spread,
            () => Tail::Repeat,
        };
        let per_rank = self.samples_per_rank(world).unwrap_or(1);
        Ok(Deal { per_rank, world, tail })
    }
}

impl<D: Source> std::fmt::Debug for DataLoader<D> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("DataLoader")
            .field("sampling", &self.sampling)
            .field("batch_size", &self.batch_size)
            .field("drop_last", &self.drop_last)
            .field("split_batches", &self.split_batches)
            .field("even_batches", &self.even_batches)
            .field("prefetch", &self.prefetch)
            .field("dispatch_batches", &self.dispatch.is_some())
            .finish_non_exhaustive()
    }
}
