//! Sampling: from noise to latents in few steps, without randomness on the way.

use anyhow::{Result, ensure};
use candle_core::Tensor;

use super::NoiseSchedule;
use super::noise_schedule::TimestepSpacing;

/// DDIM (Song et al. 2020, arXiv:2010.02502) over the time steps that diffusers' `CogVideoXDDIMScheduler` chooses.
#[derive(Debug, Clone)]
pub struct DdimSampler<'a> {
    schedule: &'a NoiseSchedule,
    timesteps: Vec<usize>,
}

impl<'a> DdimSampler<'a> {
    /// Chooses `steps` time steps.
    ///
    /// # Errors
    /// If there are none, or more than the schedule has.
    pub fn new(schedule: &'a NoiseSchedule, steps: usize) -> Result<Self> {
        let total = schedule.steps();
        ensure!(
            (1..=total).contains(&steps),
            "sampling in {steps} steps was asked for, expected 1 to {total}, the steps of the noise schedule"
        );
        let timesteps: Vec<usize> = match schedule.spacing {
            TimestepSpacing::Trailing => {
                let stride = total as f64 / steps as f64;
                let place = |i: usize| (total as f64 - stride * i as f64).round_ties_even() as usize;
                (0..steps).map(|i| place(i).saturating_sub(1)).collect()
            }
            TimestepSpacing::Leading => {
                let stride = total / steps;
                let place = |i: usize| (i * stride + schedule.steps_offset).min(total - 1);
                (0..steps).rev().map(place).collect()
            }
            TimestepSpacing::Linspace => {
                let stride = (total - 1) as f64 / (steps.max(2) - 1) as f64;
                (0..steps)
                    .rev()
                    .map(|i| (stride * i as f64).round_ties_even() as usize)
                    .collect()
            }
        };
        Ok(Self { schedule, timesteps })
    }

    /// Returns the time steps, from the most noise to the least.
    pub fn timesteps(&self) -> &[usize] {
        &self.timesteps
    }

    /// Takes latents [batch, ..] from step number `step` to the next, given the velocity predicted there; f32.
    ///
    /// # Errors
    /// If shapes differ.
    pub fn step(&self, latents: &Tensor, velocity: &Tensor, step: usize) -> Result<Tensor> {
        let t = self.timesteps[step];
        let samples = vec![t; latents.dim(0)?];
        let found = self.schedule.without_noise(velocity, latents, &samples)?;
        let alpha = self.schedule.alpha(t);
        let next = match t.checked_sub(self.schedule.steps() / self.timesteps.len()) {
            Some(next) => self.schedule.alpha(next),
            None => self.schedule.last_alpha,
        };
        // The noise of now, at its next share of the variance.
        let kept = ((1.0 - next) / (1.0 - alpha)).sqrt();
        let added = next.sqrt() - alpha.sqrt() * kept;
        Ok(((latents.to_dtype(candle_core::DType::F32)? * kept)? + (found * added)?)?)
    }

    /// Makes latents from noise with a model that predicts velocities, given latents and a time step.
    ///
    /// # Errors
    /// Those of `predict`, and as [`DdimSampler::step`].
    pub fn sample(&self, noise: Tensor, mut predict: impl FnMut(&Tensor, usize) -> Result<Tensor>) -> Result<Tensor> {
        let mut latents = noise;
        for (step, &t) in self.timesteps.iter().enumerate() {
            let velocity = predict(&latents, t)?.detach();
            latents = self.step(&latents, &velocity, step)?.detach();
        }
        Ok(latents)
    }
}
