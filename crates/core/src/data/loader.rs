//! Loaders: settings, and their prepared form that serves one rank.

use super::dataset::Dataset;
use super::order::Order;
use crate::accumulation::{Accumulation, OuterLoop};
use crate::{Error, Result};
use candle_core::Device;
use sconce_collectives::World;
use std::sync::Arc;

/// How to read a data set in batches; prepared, it serves one rank.
#[derive(Debug, Clone)]
pub struct DataLoader<D> {
    dataset: D,
    batch_size: usize,
    shuffle: bool,
    drop_last: bool,
}

impl<D: Dataset> DataLoader<D> {
    /// Reads `batch_size` samples per rank and batch, in order.
    ///
    /// With several ranks, samples at the end that do not fill a batch on every rank are filled up from the start, so
    /// that all ranks take the same number of steps. One rank alone gets a last batch that is short, as in PyTorch.
    pub fn new(dataset: D, batch_size: usize) -> Self {
        Self {
            dataset,
            batch_size,
            shuffle: false,
            drop_last: false,
        }
    }

    /// Returns the number of samples per rank and batch.
    pub(crate) fn batch_size(&self) -> usize {
        self.batch_size
    }

    /// Shuffles anew in every epoch, by the accelerator's seed.
    #[must_use]
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// Leaves out the samples at the end that do not fill a batch on every rank.
    #[must_use]
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }
}

/// A loader that gives one rank its batches.
///
/// `for batch in &mut loader` runs one epoch; every such loop is the next epoch.
#[derive(Debug)]
pub struct PreparedLoader<D> {
    dataset: D,
    order: Order,
    epoch: u64,
    device: Device,
    accumulation: Arc<Accumulation>,
}

impl<D: Dataset> PreparedLoader<D> {
    pub(crate) fn new(
        loader: DataLoader<D>,
        world: &World,
        device: &Device,
        seed: u64,
        accumulation: Arc<Accumulation>,
    ) -> Result<Self> {
        let DataLoader {
            dataset,
            batch_size,
            shuffle,
            drop_last,
        } = loader;
        let samples = dataset.len();
        if batch_size == 0 {
            return Err(Error::Loader {
                reason: "the batch size is 0; expected at least 1".into(),
            });
        }
        if samples < world.size {
            let reason = format!(
                "{samples} samples for {} ranks; every rank needs at least one",
                world.size
            );
            return Err(Error::Loader { reason });
        }
        let order = Order {
            samples,
            batch_size,
            shuffle,
            drop_last,
            seed,
            rank: world.rank,
            world: world.size,
        };
        if order.batches() == 0 {
            let reason = format!(
                "{samples} samples do not fill one batch of {batch_size} on each of {} ranks, and drop_last is set",
                world.size
            );
            return Err(Error::Loader { reason });
        }
        Ok(Self {
            dataset,
            order,
            epoch: 0,
            device: device.clone(),
            accumulation,
        })
    }

    /// Returns the number of batches in an epoch, the same on every rank.
    pub fn len(&self) -> usize {
        self.order.batches()
    }

    /// Says whether an epoch has no batches; a prepared loader always has one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of the next epoch, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Sets the number of the next epoch.
    pub fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    /// Returns the data set.
    pub fn dataset(&self) -> &D {
        &self.dataset
    }
}

impl<'l, D: Dataset> IntoIterator for &'l mut PreparedLoader<D> {
    type Item = Result<D::Batch>;
    type IntoIter = LoaderIterator<'l, D>;

    fn into_iter(self) -> LoaderIterator<'l, D> {
        let epoch = self.epoch;
        self.epoch += 1;
        let outer = self.accumulation.enter_loader();
        LoaderIterator {
            batches: self.order.of_epoch(epoch).into_iter().enumerate(),
            loader: self,
            epoch,
            outer,
        }
    }
}

/// One epoch of a loader.
#[derive(Debug)]
pub struct LoaderIterator<'l, D> {
    loader: &'l PreparedLoader<D>,
    batches: std::iter::Enumerate<std::vec::IntoIter<Vec<usize>>>,
    epoch: u64,
    outer: OuterLoop,
}

impl<D: Dataset> Iterator for LoaderIterator<'_, D> {
    type Item = Result<D::Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        let (batch, samples) = self.batches.next()?;
        self.loader.accumulation.begin_batch(self.batches.len() == 0);
        let made = self.loader.dataset.batch(&samples, &self.loader.device);
        Some(made.map_err(|source| Error::Dataset {
            batch,
            epoch: self.epoch,
            source,
        }))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.batches.size_hint()
    }
}

impl<D: Dataset> ExactSizeIterator for LoaderIterator<'_, D> {}

impl<D> Drop for LoaderIterator<'_, D> {
    fn drop(&mut self) {
        self.loader.accumulation.leave_loader(self.outer);
    }
}
