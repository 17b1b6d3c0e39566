//! From noise and text to the latents of a video.

use anyhow::Result;
use candle_core::{DType, Tensor};

use super::velocity_loss::{fill_patches, predict_velocity};
use super::{DdimSampler, NoiseSchedule};
use crate::models::CogVideoXTransformer;

/// What a video is sampled from; all tensors on the model's device.
#[derive(Debug, Clone, Copy)]
pub struct Prompt<'a> {
    /// Text [batch, tokens, width].
    pub text: &'a Tensor,
    /// Text of the same shape that predictions are taken away from, for guidance.
    pub negative: Option<&'a Tensor>,
    /// How far: not at all up to 1.
    pub guidance: f64,
    /// For image-to-video, latents of the image [batch, channels, height, width].
    pub image: Option<&'a Tensor>,
}

/// Samples latents, f32 of the shape of `noise` [batch, frames, channels, height, width], in `steps` steps, as diffusers' pipeline
/// does (Ho and Salimans 2022, arXiv:2207.12598, for guidance). `dtype` is that of the model's input.
///
/// # Errors
/// If something does not fit the model, or `steps` the schedule.
pub fn sample_video(
    model: &CogVideoXTransformer,
    schedule: &NoiseSchedule,
    noise: &Tensor,
    prompt: Prompt<'_>,
    steps: usize,
    dtype: DType,
) -> Result<Tensor> {
    let frames = noise.dim(1)?;
    let filled = fill_patches(noise, model.config().patch_frames())?;
    let added = filled.dim(1)? - frames;
    let predict = |latents: &Tensor, text: &Tensor, t: usize| -> Result<Tensor> {
        let timesteps = vec![t; latents.dim(0)?];
        let velocity = predict_velocity(model, latents, text, prompt.image, &timesteps, dtype)?;
        // Nothing is trained here: the graph is not kept.
        Ok(velocity.detach().to_dtype(DType::F32)?)
    };
    let latents = DdimSampler::new(schedule, steps)?.sample(filled, |latents, t| {
        let towards = predict(latents, prompt.text, t)?;
        let Some(negative) = prompt.negative.filter(|_| prompt.guidance > 1.0) else {
            return Ok(towards);
        };
        let away = predict(latents, negative, t)?;
        Ok(((towards - &away)? * prompt.guidance)?.add(&away)?)
    })?;
    // Frames that only filled up a patch are not part of the video.
    Ok(latents.narrow(1, added, frames)?.contiguous()?)
}
