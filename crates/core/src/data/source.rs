//! What a loader can read.

use super::reading::{MadeRounds, Reading, Sampling};
use super::{DataError, Dataset, RandomSampler, Sampler, SequentialSampler};
use std::sync::Arc;

/// What a [`DataLoader`](super::DataLoader) can read: every [`Dataset`], and a [`Stream`](super::Stream) of samples.
pub trait Source: Send + Sync + Sized + 'static {
    /// What the loop gets for a batch.
    type Batch: Send + 'static;

    /// Reads an epoch.
    #[doc(hidden)]
    fn rounds(source: &Arc<Self>, reading: Reading) -> MadeRounds<Self::Batch>;

    /// Returns how many items (samples, or whole batches) an epoch deals out, if that is known.
    #[doc(hidden)]
    fn items(&self, reading: &Reading) -> Option<usize>;
}

impl<D: Dataset> Source for D {
    type Batch = D::Batch;

    fn rounds(source: &Arc<Self>, reading: Reading) -> MadeRounds<D::Batch> {
        let dataset = Arc::clone(source);
        let samples = dataset.len();
        let (seed, epoch) = (reading.seed, reading.epoch);
        if let Sampling::Batches(sampler) = &reading.sampling {
            let batches = sampler.batches(seed, epoch).into_iter().map(move |batch| {
                if batch.is_empty() {
                    return Err("the batch sampler gave a batch of no samples".into());
                }
                batch.iter().try_for_each(|sample| check(*sample, samples))?;
                Ok(Arc::new(batch))
            });
            // A part is one batch.
            return reading.rounds(
                batches,
                |batch| batch.len(),
                move |batch, device| dataset.batch(&batch[0], device),
            );
        }
        let order = sampler(&*dataset, &reading.sampling).order(seed, epoch);
        let order = order.map(move |sample| check(sample, samples).map(|()| sample));
        reading.rounds(order, |_| 1, move |samples, device| dataset.batch(&samples, device))
    }

    fn items(&self, reading: &Reading) -> Option<usize> {
        Some(match &reading.sampling {
            Sampling::Batches(sampler) => sampler.batches(reading.seed, reading.epoch).len(),
            sampling => sampler(self, sampling).len(),
        })
    }
}

fn sampler<D: Dataset>(dataset: &D, sampling: &Sampling) -> Arc<dyn Sampler> {
    let samples = dataset.len();
    match sampling {
        Sampling::Samples(sampler) => Arc::clone(sampler),
        Sampling::Whole { shuffle: true } => Arc::new(RandomSampler { samples }),
        Sampling::Whole { shuffle: false } | Sampling::Batches(_) => Arc::new(SequentialSampler { samples }),
    }
}

fn check(sample: usize, samples: usize) -> Result<(), DataError> {
    if sample < samples {
        return Ok(());
    }
    Err(format!("the sampler gave sample {sample}; the data set has {samples}, numbered from 0").into())
}
