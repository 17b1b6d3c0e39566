//! Validation: latents are sampled from prompts, saved, and drawn. The video decoder is left to diffusers.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use candle_core::{DType, Device, Tensor, safetensors};
use sconce_core::Accelerator;
use sconce_examples::diffusion::{Draw, NoiseSchedule, Prompt, contact_sheet, normal_noise, sample_video};
use sconce_examples::models::CogVideoXTransformer;

/// Prompts, and how latents are sampled from them.
pub(crate) struct Validator {
    /// [prompts, tokens, width].
    text: Tensor,
    /// [1, tokens, width].
    negative: Option<Tensor>,
    /// [prompts, channels, height, width].
    images: Option<Tensor>,
    /// Frames, channels, height and width of a sample.
    shape: [usize; 4],
    steps: usize,
    guidance: f64,
    seed: u64,
    folder: PathBuf,
}

impl Validator {
    /// Reads prompts; samples have the shape of the training data's.
    ///
    /// # Errors
    /// If the file cannot be read or its tensors do not fit the data.
    pub(crate) fn open(
        prompts: &Path,
        shape: [usize; 4],
        with_images: bool,
        (steps, guidance, seed): (usize, f64, u64),
        output: &Path,
    ) -> Result<Self> {
        let read = || -> Result<Self> {
            let mut tensors = safetensors::load(prompts, &Device::Cpu)?;
            let mut take = |name: &str| {
                tensors
                    .remove(name)
                    .map(|tensor| tensor.to_dtype(DType::F32))
                    .transpose()
            };
            let text = take("prompt_embeds")?.context("has no tensor `prompt_embeds` [prompts, tokens, width]")?;
            let (count, tokens, width) = text.dims3().context("`prompt_embeds`")?;
            ensure!(count > 0, "`prompt_embeds` has no prompts");
            let negative = take("negative_prompt_embeds")?;
            if let Some(negative) = &negative {
                ensure!(
                    negative.dims() == [1, tokens, width],
                    "`negative_prompt_embeds` has the shape {:?}, expected {:?}",
                    negative.dims(),
                    [1, tokens, width]
                );
            }
            let images = take("image_latents")?.filter(|_| with_images);
            if with_images {
                let expected = [count, shape[1], shape[2], shape[3]];
                let found = images.as_ref().map(Tensor::dims);
                ensure!(
                    found == Some(&expected),
                    "`image_latents` has the shape {found:?}, expected {expected:?} for image-to-video"
                );
            }
            Ok(Self {
                text,
                negative,
                images,
                shape,
                steps,
                guidance,
                seed,
                folder: output.join("validation"),
            })
        };
        read().with_context(|| format!("{}: cannot be used for validation", prompts.display()))
    }

    /// Samples latents for all prompts, each on one rank, and has rank 0 write them: `step-N/latents.safetensors` with `latents`
    /// [prompts, channels, frames, height, width] as the video decoder takes them (times its scaling factor), and
    /// `contact_sheet.png`. What is sampled depends on the seed and the prompt, not on the number of ranks.
    ///
    /// # Errors
    /// Failures of the model, of the group and of writing.
    pub(crate) fn run(
        &self,
        acc: &dyn Accelerator,
        model: &CogVideoXTransformer,
        schedule: &NoiseSchedule,
        step: u64,
    ) -> Result<()> {
        let (count, ranks) = (self.text.dim(0)?, acc.world().size);
        let mut sampled = Vec::with_capacity(count);
        // Where parameters are sharded, ranks run the model together: all of them equally often.
        for round in 0..count.div_ceil(ranks) {
            let own = (round * ranks + acc.world().rank).min(count - 1);
            let latents = self.sample(acc, model, schedule, own)?.unsqueeze(0)?;
            let all = acc.gather(&latents)?.to_device(&Device::Cpu)?;
            for row in 0..ranks.min(count - round * ranks) {
                sampled.push(all.narrow(0, row, 1)?);
            }
        }
        let latents = Tensor::cat(&sampled, 0)?;
        let sheet = contact_sheet(&latents)?;
        let folder = self.folder.join(format!("step-{step}"));
        let write = || -> Result<()> {
            fs::create_dir_all(&folder)?;
            let named = HashMap::from([("latents", latents.transpose(1, 2)?.contiguous()?)]);
            safetensors::save(&named, folder.join("latents.safetensors"))?;
            Ok(fs::write(folder.join("contact_sheet.png"), &sheet)?)
        };
        let written = if acc.is_main_process() { write() } else { Ok(()) };
        acc.together(written.with_context(|| folder.display().to_string()))?;
        acc.log_image("validation", &sheet, step)?;
        acc.print(format_args!("sampled {count} videos of latents: {}", folder.display()));
        Ok(())
    }

    /// Samples one prompt's latents [frames, channels, height, width].
    fn sample(
        &self,
        acc: &dyn Accelerator,
        model: &CogVideoXTransformer,
        schedule: &NoiseSchedule,
        prompt: usize,
    ) -> Result<Tensor> {
        let (device, dtype) = (acc.device(), acc.settings().parameter_dtype());
        let of_prompt = |tensor: &Tensor| tensor.narrow(0, prompt, 1)?.to_device(device);
        let text = of_prompt(&self.text)?;
        let image = self.images.as_ref().map(of_prompt).transpose()?;
        let negative = self.negative.as_ref().map(|text| text.to_device(device)).transpose()?;
        let draw = Draw {
            seed: self.seed,
            step: u64::MAX,
            sample: prompt as u64,
        };
        let noise = normal_noise(draw, self.shape.to_vec(), device)?.unsqueeze(0)?;
        let prompt = Prompt {
            text: &text,
            negative: negative.as_ref(),
            guidance: self.guidance,
            image: image.as_ref(),
        };
        let latents = acc.autocast(|| sample_video(model, schedule, &noise, prompt, self.steps, dtype))?;
        Ok(latents.squeeze(0)?)
    }
}
