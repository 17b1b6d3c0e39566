//! How much noise there is at which time step, and the loss of a prediction made there.

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use serde::Deserialize;

/// CogVideoX's noise schedule: at time step `t` latents are `√ᾱ_t x + √(1-ᾱ_t) ε`, with `ε` standard normal.
///
/// Predictions are of the velocity `v = √ᾱ_t ε - √(1-ᾱ_t) x` (Salimans and Ho 2022, arXiv:2202.00512).
#[derive(Debug, Clone, PartialEq)]
pub struct NoiseSchedule {
    /// `ᾱ` by time step.
    alphas: Vec<f64>,
    /// `ᾱ` after the last step of sampling.
    pub(super) last_alpha: f64,
    pub(super) spacing: TimestepSpacing,
    pub(super) steps_offset: usize,
}

/// How sampling chooses its time steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum TimestepSpacing {
    Linspace,
    Leading,
    Trailing,
}

/// `scheduler_config.json`, with the defaults of diffusers' `CogVideoXDDIMScheduler`, which are not what the published pipelines say.
/// `clip_sample` is not there: that scheduler does not look at it.
#[derive(Deserialize)]
#[serde(default)]
struct SchedulerFile {
    num_train_timesteps: usize,
    beta_start: f64,
    beta_end: f64,
    beta_schedule: String,
    trained_betas: Option<Vec<f64>>,
    set_alpha_to_one: bool,
    steps_offset: usize,
    prediction_type: String,
    timestep_spacing: TimestepSpacing,
    rescale_betas_zero_snr: bool,
    snr_shift_scale: f64,
}

impl Default for SchedulerFile {
    fn default() -> Self {
        Self {
            num_train_timesteps: 1000,
            beta_start: 0.00085,
            beta_end: 0.012,
            beta_schedule: "scaled_linear".into(),
            trained_betas: None,
            set_alpha_to_one: true,
            steps_offset: 0,
            prediction_type: "epsilon".into(),
            timestep_spacing: TimestepSpacing::Leading,
            rescale_betas_zero_snr: false,
            snr_shift_scale: 3.0,
        }
    }
}

impl NoiseSchedule {
    /// Reads a pipeline's `scheduler/scheduler_config.json`.
    ///
    /// # Errors
    /// If the file cannot be read, and as [`NoiseSchedule::from_json`].
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| {
            format!(
                "{}: cannot be read; the noise schedule of a pipeline is in its folder `scheduler`",
                path.display()
            )
        })?;
        Self::from_json(&text, path)
    }

    /// Reads the text of a `scheduler_config.json`; `path` is only used to say where an error was found.
    ///
    /// # Errors
    /// If the text is not such a file, or asks for what is not implemented.
    pub fn from_json(text: &str, path: &Path) -> Result<Self> {
        let read = || Self::from_file(&serde_json::from_str(text)?);
        read().with_context(|| format!("{}: cannot be used as a CogVideoX noise schedule", path.display()))
    }

    fn from_file(file: &SchedulerFile) -> Result<Self> {
        /// Steps beyond any schedule's, which would only fill memory.
        const MOST_STEPS: usize = 1 << 20;
        let SchedulerFile {
            num_train_timesteps: steps,
            beta_start,
            beta_end,
            ..
        } = *file;
        for (name, found, supported) in [
            ("beta_schedule", &file.beta_schedule, "scaled_linear"),
            ("prediction_type", &file.prediction_type, "v_prediction"),
        ] {
            ensure!(found == supported, "`{name}` is {found:?}, supported is {supported:?}");
        }
        ensure!(
            file.trained_betas.is_none(),
            "`trained_betas` is given, supported is null"
        );
        ensure!(
            (2..=MOST_STEPS).contains(&steps),
            "`num_train_timesteps` is {steps}, expected 2 to {MOST_STEPS}"
        );
        ensure!(
            0.0 < beta_start && beta_start <= beta_end && beta_end < 1.0,
            "`beta_start` is {beta_start} and `beta_end` {beta_end}, expected 0 < beta_start <= beta_end < 1"
        );
        let shift = file.snr_shift_scale;
        ensure!(
            shift.is_finite() && shift > 0.0,
            "`snr_shift_scale` is {shift}, expected a positive number"
        );
        let (first, last) = (beta_start.sqrt(), beta_end.sqrt());
        let beta = |t: usize| (first + (last - first) * t as f64 / (steps - 1) as f64).powi(2);
        let mut product = 1.0;
        let mut alphas = Vec::from_iter((0..steps).map(|t| {
            product *= 1.0 - beta(t);
            // The ratio of signal to noise, ᾱ / (1 - ᾱ), is divided by the shift (Esser et al. 2024, arXiv:2403.03206).
            product / (shift + (1.0 - shift) * product)
        }));
        if file.rescale_betas_zero_snr {
            end_in_noise(&mut alphas);
        }
        Ok(Self {
            last_alpha: if file.set_alpha_to_one { 1.0 } else { alphas[0] },
            alphas,
            spacing: file.timestep_spacing,
            steps_offset: file.steps_offset,
        })
    }

    /// Returns the number of time steps.
    pub fn steps(&self) -> usize {
        self.alphas.len()
    }

    /// Returns `ᾱ_t`, the share of the variance that is signal.
    ///
    /// # Panics
    /// If `t` is not below [`NoiseSchedule::steps`].
    pub fn alpha(&self, t: usize) -> f64 {
        self.alphas[t]
    }

    /// Mixes latents with standard normal noise of their shape [batch, ..], in f32.
    ///
    /// # Errors
    /// If shapes differ, or there is not one time step below [`NoiseSchedule::steps`] for each sample.
    pub fn add_noise(&self, latents: &Tensor, noise: &Tensor, timesteps: &[usize]) -> Result<Tensor> {
        let signal = self.coefficients(latents, timesteps, f64::sqrt)?;
        let share = self.coefficients(latents, timesteps, |alpha| (1.0 - alpha).sqrt())?;
        let (latents, noise) = (latents.to_dtype(DType::F32)?, noise.to_dtype(DType::F32)?);
        Ok((latents.broadcast_mul(&signal)? + noise.broadcast_mul(&share)?)?)
    }

    /// Returns the latents without noise that a predicted velocity means, in f32: `√ᾱ_t noisy - √(1-ᾱ_t) v`.
    ///
    /// # Errors
    /// As [`NoiseSchedule::add_noise`].
    pub fn without_noise(&self, velocity: &Tensor, noisy: &Tensor, timesteps: &[usize]) -> Result<Tensor> {
        let signal = self.coefficients(noisy, timesteps, f64::sqrt)?;
        let share = self.coefficients(noisy, timesteps, |alpha| (1.0 - alpha).sqrt())?;
        let (velocity, noisy) = (velocity.to_dtype(DType::F32)?, noisy.to_dtype(DType::F32)?);
        Ok((noisy.broadcast_mul(&signal)? - velocity.broadcast_mul(&share)?)?)
    }

    /// Returns the loss of predicted velocities, a scalar in f32: the mean of `(x̂ - x)² / (1 - ᾱ_t)`, where `x̂` is what the
    /// prediction means and `x` are the latents. It is the mean of `(v̂ - v)²`.
    ///
    /// # Errors
    /// As [`NoiseSchedule::add_noise`].
    pub fn loss(&self, velocity: &Tensor, noisy: &Tensor, latents: &Tensor, timesteps: &[usize]) -> Result<Tensor> {
        let found = self.without_noise(velocity, noisy, timesteps)?;
        let weights = self.coefficients(latents, timesteps, |alpha| 1.0 / (1.0 - alpha))?;
        let squares = (found - latents.to_dtype(DType::F32)?)?.sqr()?;
        Ok(squares.broadcast_mul(&weights)?.mean_all()?)
    }

    /// Returns a number for each sample, of a shape that broadcasts against `like`.
    fn coefficients(&self, like: &Tensor, timesteps: &[usize], of: impl Fn(f64) -> f64) -> Result<Tensor> {
        let batch = like.dim(0)?;
        ensure!(
            timesteps.len() == batch,
            "{} time steps were given for {batch} samples",
            timesteps.len()
        );
        let mut numbers = Vec::with_capacity(batch);
        for &t in timesteps {
            let Some(&alpha) = self.alphas.get(t) else {
                bail!(
                    "time step {t} is not below {}, the steps of the noise schedule",
                    self.steps()
                )
            };
            numbers.push(of(alpha) as f32);
        }
        let mut shape = vec![1; like.rank()];
        shape[0] = batch;
        Ok(Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_device(like.device())?)
    }
}

/// Stretches `√ᾱ` so that nothing of the signal is left at the last step, and the first stays as it is (Lin et al. 2023,
/// arXiv:2305.08891, algorithm 1).
fn end_in_noise(alphas: &mut [f64]) {
    let roots = Vec::from_iter(alphas.iter().map(|alpha| alpha.sqrt()));
    let (first, last) = (roots[0], roots[roots.len() - 1]);
    for (alpha, root) in alphas.iter_mut().zip(roots) {
        *alpha = ((root - last) * (first / (first - last))).powi(2);
    }
}
