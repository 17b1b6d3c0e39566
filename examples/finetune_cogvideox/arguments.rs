//! The command line: names and defaults are those of CogVideoX's own trainer, where there is something for them to do here.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::{ArgAction, Parser, ValueEnum};
use sconce_core::deepspeed::MixedPrecision;
use sconce_core::nn::LoraOptions;
use sconce_examples::models::{Adapters, CogVideoXConfig};

/// The pipeline, data and prompts that come with the examples.
const SHIPPED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tiny-cogvideox");

/// Fine-tunes a CogVideoX video transformer on encoded videos.
#[derive(Debug, Parser)]
#[command(rename_all = "snake_case", allow_negative_numbers = true, args_override_self = true)]
pub(crate) struct Arguments {
    /// Pipeline folder of diffusers' with `transformer` and `scheduler`; the small one shipped with the examples by default.
    #[arg(long, default_value = SHIPPED, hide_default_value = true)]
    pub(crate) model_path: PathBuf,
    /// Name of the model as it was published, such as cogvideox-5b-i2v; only to check --train_resolution and the precision by.
    #[arg(long)]
    pub(crate) model_name: Option<String>,
    /// Text-to-video or image-to-video.
    #[arg(long, value_enum, default_value_t = ModelType::T2v)]
    pub(crate) model_type: ModelType,
    /// Adapters beside the attention layers, or all weights.
    #[arg(long, value_enum, default_value_t = TrainingType::Lora)]
    pub(crate) training_type: TrainingType,
    /// Folder of safetensors shards with `latents`, `prompt_embeds` and, for image-to-video, `image_latents`; a small set shipped
    /// with the examples by default.
    #[arg(long)]
    pub(crate) data_root: Option<PathBuf>,
    /// Folder for checkpoints, logs, samples and the result; nothing is written without.
    #[arg(long)]
    pub(crate) output_dir: Option<PathBuf>,
    /// Experiment trackers with commas between, all, or none.
    #[arg(long, value_name = "NAME[,NAME]", requires = "output_dir")]
    pub(crate) report_to: Option<String>,
    /// The project's name in trackers.
    #[arg(long, default_value = "finetrainer-cogvideo")]
    pub(crate) tracker_name: String,
    /// Go on from a checkpoint: its folder, or `latest` for the newest complete one in --output_dir, if there is one.
    #[arg(long)]
    pub(crate) resume_from_checkpoint: Option<PathBuf>,
    /// Seed of the order of samples, of noise, time steps and new adapters.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// Times through the data, where --train_steps does not say.
    #[arg(long, default_value_t = 10)]
    pub(crate) train_epochs: u64,
    /// Optimizer steps.
    #[arg(long)]
    pub(crate) train_steps: Option<u64>,
    /// Optimizer steps between two checkpoints; 0 for none.
    #[arg(long, default_value_t = 200)]
    pub(crate) checkpointing_steps: u64,
    /// How many checkpoints are kept.
    #[arg(long, default_value_t = 10)]
    pub(crate) checkpointing_limit: usize,
    /// Samples that one rank takes at a time.
    #[arg(long, default_value_t = 1)]
    pub(crate) batch_size: usize,
    /// Micro-batches whose gradients add up to one optimizer step; by default what the launcher says, or 1.
    #[arg(long)]
    pub(crate) gradient_accumulation_steps: Option<u64>,
    /// FRAMESxHEIGHTxWIDTH of the videos before they were encoded, to check the data by.
    #[arg(long)]
    pub(crate) train_resolution: Option<Resolution>,
    /// Precision of parameters and activations; by default what the launcher says, or no.
    #[arg(long, value_enum)]
    pub(crate) mixed_precision: Option<Precision>,
    /// Learning rate.
    #[arg(long, default_value_t = 2e-5)]
    pub(crate) learning_rate: f64,
    /// Update rule. Where a DeepSpeed configuration has an optimizer, it is that one.
    #[arg(long, value_enum, default_value_t = OptimizerName::Adamw)]
    pub(crate) optimizer: OptimizerName,
    /// Decay of the first moment.
    #[arg(long, default_value_t = 0.9)]
    pub(crate) beta1: f64,
    /// Decay of the second moment.
    #[arg(long, default_value_t = 0.95)]
    pub(crate) beta2: f64,
    /// Added to the root of the second moment.
    #[arg(long, default_value_t = 1e-8)]
    pub(crate) epsilon: f64,
    /// Weight decay of every parameter.
    #[arg(long, default_value_t = 1e-4)]
    pub(crate) weight_decay: f64,
    /// Largest global norm of the gradients.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) max_grad_norm: f64,
    /// Learning rate over the run. Where a DeepSpeed configuration has a scheduler, it is that one.
    #[arg(long, value_enum, default_value_t = ScheduleName::ConstantWithWarmup)]
    pub(crate) lr_scheduler: ScheduleName,
    /// Optimizer steps over which the learning rate rises from 0, whatever the number of ranks.
    #[arg(long, default_value_t = 100)]
    pub(crate) lr_warmup_steps: u64,
    /// Falls of cosine_with_restarts.
    #[arg(long, default_value_t = 1)]
    pub(crate) lr_num_cycles: u64,
    /// The exponent of polynomial.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) lr_power: f64,
    /// Batches that are read ahead; 0 reads each when it is needed.
    #[arg(long, default_value_t = 8)]
    pub(crate) num_workers: usize,
    /// Compute the blocks again in the backward instead of keeping what it needs.
    #[arg(long, default_value_t = true, action = ArgAction::Set, value_name = "true|false")]
    pub(crate) gradient_checkpointing: bool,
    /// Seconds that a rank waits for the others in a collective.
    #[arg(long, default_value_t = 1800, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) nccl_timeout: u64,
    /// Rows of the adapters' first matrix.
    #[arg(long, default_value_t = 128)]
    pub(crate) rank: usize,
    /// Adapters are multiplied by lora_alpha / rank.
    #[arg(long, default_value_t = 64.0)]
    pub(crate) lora_alpha: f64,
    /// Layers with adapters.
    #[arg(long, num_args = 1.., default_values = ["to_q", "to_k", "to_v", "to_out.0"])]
    pub(crate) target_modules: Vec<String>,
    /// Sample latents from prompts every --validation_steps, and after the last step.
    #[arg(long, default_value_t = false, action = ArgAction::Set, value_name = "true|false", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) do_validation: bool,
    /// Optimizer steps between two validations; a multiple of --checkpointing_steps.
    #[arg(long)]
    pub(crate) validation_steps: Option<u64>,
    /// Folder with the file that --validation_prompts names.
    #[arg(long)]
    pub(crate) validation_dir: Option<PathBuf>,
    /// Safetensors file with `prompt_embeds` [prompts, tokens, width], perhaps `negative_prompt_embeds` [1, tokens, width], and
    /// `image_latents` [prompts, channels, height, width] for image-to-video.
    #[arg(long)]
    pub(crate) validation_prompts: Option<PathBuf>,
    /// Steps of sampling.
    #[arg(long, default_value_t = 50)]
    pub(crate) validation_inference_steps: usize,
    /// How far predictions are taken away from those for the negative prompt, where there is one.
    #[arg(long, default_value_t = 6.0)]
    pub(crate) guidance_scale: f64,
    /// Optimizer steps between two printed lines.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) logging_steps: u64,
    /// Print at the end what each rank holds and moves.
    #[arg(long)]
    pub(crate) report: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ModelType {
    T2v,
    I2v,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TrainingType {
    Lora,
    Sft,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Precision {
    No,
    Fp16,
    Bf16,
}

impl From<Precision> for MixedPrecision {
    fn from(precision: Precision) -> Self {
        match precision {
            Precision::No => Self::No,
            Precision::Fp16 => Self::Fp16,
            Precision::Bf16 => Self::Bf16,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OptimizerName {
    Adam,
    Adamw,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum ScheduleName {
    Constant,
    ConstantWithWarmup,
    Linear,
    Cosine,
    CosineWithRestarts,
    Polynomial,
}

/// Frames, height and width of a video in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resolution([usize; 3]);

impl std::str::FromStr for Resolution {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = text
            .split('x')
            .map(|part| part.parse().ok().filter(|number| *number > 0));
        let numbers: Option<Vec<usize>> = numbers.collect();
        let Some(&[frames, height, width]) = numbers.as_deref() else {
            return Err("expected FRAMESxHEIGHTxWIDTH, such as 49x480x720".into());
        };
        if (frames - 1) % 8 != 0 {
            return Err(format!(
                "{frames} frames: expected 1 more than a multiple of 8, such as 49 or 81"
            ));
        }
        Ok(Self([frames, height, width]))
    }
}

impl Resolution {
    /// Pixels to an element of the latents, in height and width, of the models' video encoder.
    const SPATIAL_COMPRESSION: usize = 8;

    /// Checks that latents of this shape [frames, channels, height, width] come from videos of this size.
    fn check(self, shape: [usize; 4], config: &CogVideoXConfig) -> Result<()> {
        let [frames, height, width] = self.0;
        let expected = [
            (frames - 1) / config.temporal_compression_ratio + 1,
            height / Self::SPATIAL_COMPRESSION,
            width / Self::SPATIAL_COMPRESSION,
        ];
        let found = [shape[0], shape[2], shape[3]];
        ensure!(
            found == expected,
            "--train_resolution {frames}x{height}x{width} makes latents of {expected:?} frames, height and width, and the data \
             has {found:?}"
        );
        Ok(())
    }
}

/// What a validation needs, checked.
#[derive(Debug, Clone)]
pub(crate) struct Validation {
    /// File of prompts.
    pub(crate) prompts: PathBuf,
    /// Optimizer steps between two.
    pub(crate) every: u64,
}

impl Arguments {
    /// Returns the folder of the training data.
    pub(crate) fn data_root(&self) -> PathBuf {
        self.data_root
            .clone()
            .unwrap_or_else(|| Path::new(SHIPPED).join("data"))
    }

    /// Returns the adapters that are trained, if it is adapters.
    ///
    /// # Errors
    /// If they cannot be made.
    pub(crate) fn adapters(&self) -> Result<Option<Adapters>> {
        if self.training_type == TrainingType::Sft {
            return Ok(None);
        }
        ensure!(self.rank > 0, "--rank is 0, expected at least 1");
        let options = LoraOptions {
            rank: self.rank,
            alpha: self.lora_alpha,
            ..LoraOptions::default()
        };
        Adapters::new(options, &self.target_modules)
            .context("--target_modules")
            .map(Some)
    }

    /// Returns what a validation needs, if one is asked for.
    ///
    /// # Errors
    /// If something is missing for it, as in CogVideoX's trainer.
    pub(crate) fn validation(&self) -> Result<Option<Validation>> {
        if !self.do_validation {
            return Ok(None);
        }
        let missing = |what: &str| format!("--do_validation needs {what}");
        let every = self.validation_steps.with_context(|| missing("--validation_steps"))?;
        let folder = self
            .validation_dir
            .as_ref()
            .with_context(|| missing("--validation_dir"))?;
        let prompts = self.validation_prompts.as_ref();
        let prompts = prompts.with_context(|| missing("--validation_prompts"))?;
        ensure!(
            self.output_dir.is_some(),
            missing("--output_dir, where samples are written")
        );
        ensure!(
            every > 0 && self.checkpointing_steps > 0 && every.is_multiple_of(self.checkpointing_steps),
            "--validation_steps is {every}, expected a multiple of --checkpointing_steps, {}",
            self.checkpointing_steps
        );
        Ok(Some(Validation {
            prompts: folder.join(prompts),
            every,
        }))
    }

    /// Checks what can be checked before anything is read.
    ///
    /// # Errors
    /// If values are out of range or do not fit together.
    pub(crate) fn check(&self) -> Result<()> {
        ensure!(self.batch_size > 0, "--batch_size is 0, expected at least 1");
        ensure!(self.train_steps != Some(0), "--train_steps is 0, expected at least 1");
        ensure!(self.train_epochs > 0, "--train_epochs is 0, expected at least 1");
        ensure!(
            self.checkpointing_limit > 0,
            "--checkpointing_limit is 0, expected at least 1"
        );
        ensure!(
            self.resume_from_checkpoint.as_deref() != Some(Path::new("latest")) || self.output_dir.is_some(),
            "--resume_from_checkpoint latest needs --output_dir, where checkpoints are"
        );
        let is_published = |part: &str| self.model_name.as_deref().is_some_and(|name| name.contains(part));
        if let Some(Resolution([_, height, width])) = self.train_resolution
            && is_published("cogvideox-5b")
        {
            ensure!(
                (height, width) == (480, 720),
                "--train_resolution has {height}x{width}, expected 480x720 for the 5B models"
            );
        }
        self.validation().map(drop)
    }

    /// Checks that model and data are what was asked for.
    ///
    /// # Errors
    /// If they are not.
    pub(crate) fn check_against(&self, config: &CogVideoXConfig, latents: [usize; 4], text: [usize; 2]) -> Result<()> {
        let model = self.model_path.display();
        let is_image_to_video = self.model_type == ModelType::I2v;
        ensure!(
            config.is_image_to_video() == is_image_to_video,
            "{model}: has {} input and {} output channels, which is {}; choose --model_type {}",
            config.in_channels,
            config.out_channels,
            if is_image_to_video {
                "text-to-video"
            } else {
                "image-to-video"
            },
            if is_image_to_video { "t2v" } else { "i2v" },
        );
        // The models with sinusoids added are those of 2B, which alone were trained in f16.
        ensure!(
            self.mixed_precision != Some(Precision::Fp16) || !config.use_rotary_positional_embeddings,
            "--mixed_precision fp16 is for the 2B model; {model} is one that was trained in bf16: its activations overflow in \
             fp16. Choose bf16"
        );
        ensure!(
            latents[1] == config.out_channels,
            "the data has latents of {} channels, and the model those of {}; encode the videos with the model's own encoder",
            latents[1],
            config.out_channels
        );
        ensure!(
            text[1] == config.text_embed_dim && text[0] <= config.max_text_seq_length,
            "the data has text of {} tokens of {} numbers, expected at most {} of {}",
            text[0],
            text[1],
            config.max_text_seq_length,
            config.text_embed_dim
        );
        self.train_resolution
            .map_or(Ok(()), |resolution| resolution.check(latents, config))
    }
}
