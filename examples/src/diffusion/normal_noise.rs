//! Noise that depends on the sample and the step alone: a run draws the same on any number of ranks, and after a restart.

use candle_core::{Device, Result, Shape, Tensor};
use rand::{Rng as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;

/// What is drawn for: a sample in an optimizer step of a run, or in a validation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draw {
    /// The run's seed.
    pub seed: u64,
    /// The optimizer step.
    pub step: u64,
    /// The sample's number in its data set.
    pub sample: u64,
}

impl Draw {
    /// Returns the generator of this draw. Seed, step and sample are its key as they are, so that no two have one stream.
    fn generator(self, purpose: u64) -> ChaCha8Rng {
        let mut key = [0u8; 32];
        for (place, word) in key
            .chunks_exact_mut(8)
            .zip([self.seed, self.step, self.sample, purpose])
        {
            place.copy_from_slice(&word.to_le_bytes());
        }
        ChaCha8Rng::from_seed(key)
    }

    /// Draws a time step below `steps`, each as likely.
    pub fn timestep(self, steps: usize) -> usize {
        self.generator(0).random_range(0..steps)
    }
}

/// Draws standard normal numbers, f32 of the given shape.
///
/// # Errors
/// Failures of candle.
pub fn normal_noise(draw: Draw, shape: impl Into<Shape>, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    let numbers: Vec<f32> = draw
        .generator(1)
        .sample_iter(StandardNormal)
        .take(shape.elem_count())
        .collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_device(device)
}
