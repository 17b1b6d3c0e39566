//! One forward of training: noise is added, the model predicts, and the prediction is judged.

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};

use super::{Draw, NoiseSchedule, VideoBatch, normal_noise};
use crate::models::{CogVideoXTransformer, VideoInput};

/// The ofs input with which models that have one were trained.
const OFS: f64 = 2.0;

/// Computes the loss of a batch, a scalar in f32, as CogVideoX's own trainer does.
///
/// Time steps and noise are those of `(seed, step)` and each sample's number, whatever the rank. `dtype` is that of the model's
/// input.
///
/// # Errors
/// If the batch does not fit the model.
pub fn velocity_loss(
    model: &CogVideoXTransformer,
    schedule: &NoiseSchedule,
    batch: &VideoBatch,
    (seed, step): (u64, u64),
    dtype: DType,
) -> Result<Tensor> {
    let latents = fill_patches(&batch.latents, model.config().patch_frames())?;
    let draws = Vec::from_iter(batch.samples.iter().map(|&sample| Draw { seed, step, sample }));
    let timesteps = Vec::from_iter(draws.iter().map(|draw| draw.timestep(schedule.steps())));
    let shape = &latents.dims()[1..];
    let noise = draws.iter().map(|draw| normal_noise(*draw, shape, latents.device()));
    let noise = Tensor::stack(&noise.collect::<candle_core::Result<Vec<_>>>()?, 0)?;
    let noisy = schedule.add_noise(&latents, &noise, &timesteps)?;
    let velocity = predict_velocity(model, &noisy, &batch.text, batch.images.as_ref(), &timesteps, dtype)?;
    schedule.loss(&velocity, &noisy, &latents, &timesteps)
}

/// Predicts the velocity at noisy latents [batch, frames, channels, height, width]; for image-to-video beside the latents of an
/// image [batch, channels, height, width], which is the first frame's neighbour and zeros are the others'.
///
/// # Errors
/// If the model needs an image and there is none, or the other way round; those of the model.
pub(super) fn predict_velocity(
    model: &CogVideoXTransformer,
    noisy: &Tensor,
    text: &Tensor,
    images: Option<&Tensor>,
    timesteps: &[usize],
    dtype: DType,
) -> Result<Tensor> {
    let device = noisy.device();
    let needs_image = model.config().is_image_to_video();
    ensure!(
        needs_image == images.is_some(),
        "the model is for {} and the data has {}",
        if needs_image { "image-to-video" } else { "text-to-video" },
        if images.is_some() {
            "image latents"
        } else {
            "no image latents"
        }
    );
    let latents = match images {
        Some(images) => {
            let (_, frames, ..) = noisy.dims5()?;
            let first = images.to_dtype(noisy.dtype())?.unsqueeze(1)?;
            let beside = first.pad_with_zeros(1, 0, frames - 1)?;
            Tensor::cat(&[noisy, &beside], 2)?
        }
        None => noisy.clone(),
    };
    let timestep = Vec::from_iter(timesteps.iter().map(|t| *t as i64));
    let timestep = Tensor::new(timestep.as_slice(), device)?;
    let input = VideoInput {
        latents: &latents.to_dtype(dtype)?,
        text: &text.to_dtype(dtype)?,
        timestep: &timestep,
        ofs: model.config().ofs_embed_dim.map(|_| OFS),
    };
    Ok(model.forward(input)?)
}

/// Repeats the first of frames [batch, frames, ..] in front until patches of `depth` frames cover them all.
///
/// # Errors
/// Failures of candle.
pub fn fill_patches(latents: &Tensor, depth: usize) -> candle_core::Result<Tensor> {
    let frames = latents.dim(1)?;
    let missing = frames.next_multiple_of(depth) - frames;
    if missing == 0 {
        return Ok(latents.clone());
    }
    let first = latents.narrow(1, 0, 1)?;
    let mut parts = vec![&first; missing];
    parts.push(latents);
    Tensor::cat(&parts, 1)
}
