//! Data sets that can only be read from their beginning.

use super::collate::Collate;
use super::reading::{MadeRounds, Reading};
use super::{DataError, Source};
use candle_core::Device;
use std::sync::Arc;

/// Samples of one pass over a stream.
///
/// After a failed sample, reading goes on with the next, if the iterator does.
pub type SampleIterator<T> = Box<dyn Iterator<Item = Result<T, DataError>> + Send>;

/// A data set that is read from its beginning, sample after sample: a log, a shuffling buffer, a generator.
///
/// Every rank reads the whole stream and takes its own samples of it, so that all ranks must read the same; where they
/// cannot, or reading is dear, [`dispatch_batches`](super::DataLoader::dispatch_batches) lets rank 0 read for all.
/// What is random in it should be drawn from [`RandomState`](crate::RandomState), which follows from seed and epoch here.
pub trait IterableDataset: Send + Sync + 'static {
    /// A sample; the first ones of an epoch are cloned, to fill up its last batch.
    type Sample: Clone + Send + 'static;

    /// Begins a pass, that of `epoch`.
    ///
    /// # Errors
    /// Whatever opening the stream may fail with.
    fn samples(&self, epoch: u64) -> Result<SampleIterator<Self::Sample>, DataError>;

    /// Returns the number of samples of a pass, if it is known before.
    fn length(&self) -> Option<usize> {
        None
    }
}

/// How samples become a batch.
type CollateFn<T, B> = dyn Fn(Vec<T>, &Device) -> Result<B, DataError> + Send + Sync;

/// A stream of samples, and how they become batches; made by [`DataLoader::stream`](super::DataLoader::stream).
pub struct Stream<S: IterableDataset, B> {
    pub(super) dataset: S,
    collate: Arc<CollateFn<S::Sample, B>>,
}

impl<S: IterableDataset, B> Stream<S, B> {
    pub(super) fn new(
        dataset: S,
        collate: impl Fn(Vec<S::Sample>, &Device) -> Result<B, DataError> + Send + Sync + 'static,
    ) -> Self {
        let collate = Arc::new(collate);
        Self { dataset, collate }
    }

    /// Returns the data set.
    pub fn dataset(&self) -> &S {
        &self.dataset
    }
}

impl<S: IterableDataset<Sample: Collate>> Stream<S, <S::Sample as Collate>::Batch> {
    pub(super) fn collating(dataset: S) -> Self {
        Self::new(dataset, S::Sample::collate)
    }
}

impl<S: IterableDataset, B: Send + 'static> Source for Stream<S, B> {
    type Batch = B;

    fn rounds(source: &Arc<Self>, reading: Reading) -> MadeRounds<B> {
        let collate = Arc::clone(&source.collate);
        let source = Arc::clone(source);
        let epoch = reading.epoch;
        let mut begun = None;
        // Opened by the first sample that is asked for, where its failure has a place.
        let samples = std::iter::from_fn(move || {
            let samples = begun.get_or_insert_with(|| match source.dataset.samples(epoch) {
                Ok(samples) => samples,
                Err(error) => Box::new(std::iter::once(Err(error))),
            });
            samples.next()
        });
        reading.rounds(samples, |_| 1, move |samples, device| collate(samples, device))
    }

    fn items(&self, _: &Reading) -> Option<usize> {
        self.dataset.length()
    }
}

impl<S: IterableDataset + Clone, B> Clone for Stream<S, B> {
    fn clone(&self) -> Self {
        Self {
            dataset: self.dataset.clone(),
            collate: Arc::clone(&self.collate),
        }
    }
}

impl<S: IterableDataset + std::fmt::Debug, B> std::fmt::Debug for Stream<S, B> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Stream").field(&self.dataset).finish()
    }
}
