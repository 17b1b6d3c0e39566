//! Samplers: which samples an epoch has, and in which order.
//!
//! An order is a function of (seed, epoch) alone: the same on all ranks, whatever their number, and on every run.

use super::permutation::{TorchGenerator, permutation};
use crate::{Error, Result};

/// Numbers of samples in the order in which they are read.
pub type SampleOrder = Box<dyn Iterator<Item = usize> + Send>;

/// Chooses samples of a [`Dataset`](super::Dataset), and their order.
pub trait Sampler: Send + Sync + std::fmt::Debug {
    /// Returns how many samples an epoch has.
    fn len(&self) -> usize;

    /// Says whether an epoch has no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the samples of an epoch: [`len`](Sampler::len) numbers below the data set's length, by `seed` and `epoch`
    /// alone.
    fn order(&self, seed: u64, epoch: u64) -> SampleOrder;
}

/// Every sample once, in order.
#[derive(Debug, Clone, Copy)]
pub struct SequentialSampler {
    /// Number of samples.
    pub samples: usize,
}

impl Sampler for SequentialSampler {
    fn len(&self) -> usize {
        self.samples
    }

    fn order(&self, _: u64, _: u64) -> SampleOrder {
        Box::new(0..self.samples)
    }
}

/// Every sample once, in the order of accelerate's seedable sampler: `torch.randperm` of a CPU generator whose seed is
/// `seed + epoch`.
#[derive(Debug, Clone, Copy)]
pub struct RandomSampler {
    /// Number of samples.
    pub samples: usize,
}

impl Sampler for RandomSampler {
    fn len(&self) -> usize {
        self.samples
    }

    fn order(&self, seed: u64, epoch: u64) -> SampleOrder {
        Box::new(permutation(self.samples, seed.wrapping_add(epoch)).into_iter())
    }
}

/// Some of the samples, each once: in the order given, or shuffled as by PyTorch's `SubsetRandomSampler`.
#[derive(Debug, Clone)]
pub struct SubsetSampler {
    /// Numbers of the samples.
    pub samples: Vec<usize>,
    /// Whether their order is another in every epoch.
    pub shuffle: bool,
}

impl Sampler for SubsetSampler {
    fn len(&self) -> usize {
        self.samples.len()
    }

    fn order(&self, seed: u64, epoch: u64) -> SampleOrder {
        let samples = self.samples.clone();
        if self.shuffle {
            let order = permutation(samples.len(), seed.wrapping_add(epoch));
            Box::new(order.into_iter().map(move |at| samples[at]))
        } else {
            Box::new(samples.into_iter())
        }
    }
}

/// Draws samples by weight, with replacement: a sample may come several times in an epoch, or never.
#[derive(Debug, Clone)]
pub struct WeightedSampler {
    /// Sums of the weights up to and with each sample.
    sums: Vec<f64>,
    draws: usize,
}

impl WeightedSampler {
    /// Makes a sampler of `draws` samples an epoch, where sample i comes with probability `weights[i]` / their sum.
    ///
    /// # Errors
    /// [`Error::Loader`] when a weight is negative or not finite, or none is above 0.
    pub fn new(weights: &[f64], draws: usize) -> Result<Self> {
        if let Some(at) = weights
            .iter()
            .position(|weight| !(*weight >= 0.0 && weight.is_finite()))
        {
            let reason = format!("weight {at} is {}; expected a finite number, 0 or above", weights[at]);
            return Err(Error::Loader { reason });
        }
        let mut sum = 0.0;
        let add = |weight: &f64| {
            sum += weight;
            sum
        };
        let sums: Vec<f64> = weights.iter().map(add).collect();
        if !(sum > 0.0 && sum.is_finite()) {
            let reason = format!(
                "{} weights with a sum of {sum}; expected a finite sum above 0",
                sums.len()
            );
            return Err(Error::Loader { reason });
        }
        Ok(Self { sums, draws })
    }
}

impl Sampler for WeightedSampler {
    fn len(&self) -> usize {
        self.draws
    }

    fn order(&self, seed: u64, epoch: u64) -> SampleOrder {
        let mut generator = TorchGenerator::new(seed.wrapping_add(epoch));
        let sums = self.sums.clone();
        let total = sums.last().copied().unwrap_or_default();
        let draw = move |_| {
            let drawn = generator.next_f64() * total;
            // Rounding may bring the product up to the sum, which belongs to no sample.
            let at = sums.partition_point(|sum| *sum <= drawn);
            if at < sums.len() {
                at
            } else {
                sums.partition_point(|sum| *sum < total)
            }
        };
        Box::new((0..self.draws).map(draw))
    }
}
