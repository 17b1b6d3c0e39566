//! What a run works on: read and checked before anything is trained.

use std::fs::File;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use sconce_core::nn::{LoraLinear, LoraOptions};
use sconce_core::trackers::Trackers;
use sconce_core::{Accelerator, Dataset as _, WeightFiles, Weights};
use sconce_examples::huggingface::{ModelFolder, check_model_folder_is_free};
use sconce_examples::models::{Llama, LlamaAdapters, LlamaConfig};
use sconce_examples::text::{
    ChatTemplate, DataOptions, ExampleEncoder, PromptFormat, SpecialTokens, TextEncoder, TrainingData,
};

use crate::arguments::Arguments;
use crate::samples::Sampler;

/// What a run works on, checked.
pub(crate) struct Run {
    pub(crate) folder: ModelFolder,
    pub(crate) adapters: Option<LlamaAdapters>,
    pub(crate) model: Llama,
    pub(crate) data: TrainingData,
    pub(crate) held_out: Option<TrainingData>,
    pub(crate) sampler: Option<Sampler>,
    pub(crate) batch_size: usize,
    pub(crate) steps: u64,
    pub(crate) metrics: Option<File>,
    pub(crate) trackers: Trackers,
}

/// Reads and checks everything that a run needs; no rank waits for another here.
pub(crate) fn prepare(arguments: &Arguments, acc: &dyn Accelerator) -> Result<Run> {
    check(arguments)?;
    if let Some(directory) = arguments.output_dir.as_ref().filter(|_| acc.is_main_process()) {
        check_model_folder_is_free(directory)?;
    }
    let folder = match arguments.random_weights {
        true => ModelFolder::open_without_weights(&arguments.model_dir)?,
        false => ModelFolder::open(&arguments.model_dir)?,
    };
    let config = LlamaConfig::from_model_folder(&folder)?;
    let texts = Texts::read(arguments, &folder, &config)?;
    let (data, held_out) = texts.data(arguments, &config)?;
    if let Some(notice) = data.notice().filter(|_| acc.is_main_process()) {
        eprintln!("note: {notice}");
    }
    let is_evaluated = held_out.is_some();
    ensure!(
        is_evaluated || (arguments.eval_steps.is_none() && arguments.early_stopping_patience.is_none()),
        "--eval_steps and --early_stopping_patience need data to evaluate on: --eval_data or --eval_fraction"
    );
    let (batch_size, steps) = shape_of_run(arguments, acc, &data)?;
    let adapters = adapters(arguments)?;
    let weights = weights(arguments, &folder, adapters.is_some())?;
    let model = Llama::with_adapters(&config, adapters.as_ref(), acc.var_builder(weights)?)?;
    let metrics = match arguments.metrics_out.as_ref().filter(|_| acc.is_main_process()) {
        Some(path) => Some(File::create(path).with_context(|| format!("{}: cannot be written", path.display()))?),
        None => None,
    };
    let trackers = match &arguments.report_to {
        Some(names) => Trackers::from_names(names, &arguments.logging_dir).context("--report_to")?,
        None => Trackers::default(),
    };
    let sampler = texts.sampler(arguments, &data)?;
    Ok(Run {
        folder,
        adapters,
        model,
        data,
        held_out,
        sampler,
        batch_size,
        steps,
        metrics,
        trackers,
    })
}

fn check(arguments: &Arguments) -> Result<()> {
    ensure!(arguments.logging_steps > 0, "--logging_steps is 0, expected at least 1");
    ensure!(
        arguments.eval_steps != Some(0),
        "--eval_steps is 0, expected at least 1"
    );
    ensure!(
        arguments.early_stopping_patience != Some(0),
        "--early_stopping_patience is 0, expected at least 1 evaluation"
    );
    ensure!(
        arguments.temperature.is_finite() && arguments.temperature >= 0.0,
        "--temperature is {}, expected 0 or more",
        arguments.temperature
    );
    Ok(())
}

/// Returns the adapters that are asked for.
pub(crate) fn adapters(arguments: &Arguments) -> Result<Option<LlamaAdapters>> {
    let Some(rank) = arguments.lora_r else { return Ok(None) };
    let options = LoraOptions {
        rank,
        alpha: arguments.lora_alpha.unwrap_or(2.0 * rank as f64),
        dropout: arguments.lora_dropout,
        rank_stabilized: arguments.use_rslora,
    };
    LlamaAdapters::new(options, &arguments.lora_target_modules)
        .context("--lora_r")
        .map(Some)
}

fn weights(arguments: &Arguments, folder: &ModelFolder, has_adapters: bool) -> Result<Weights> {
    let seed = arguments.seed;
    if arguments.random_weights {
        return Ok(Weights::Random { seed });
    }
    let files = WeightFiles::open(&folder.weights)?;
    Ok(match has_adapters {
        true => Weights::FilesAndRandom {
            files,
            drawn: LoraLinear::adapter_parameters(),
            seed,
        },
        false => Weights::Files(files),
    })
}

/// What reads and writes the model's text; files of ready tokens need none.
struct Texts {
    parts: Option<(TextEncoder, SpecialTokens, PromptFormat)>,
}

impl Texts {
    fn read(arguments: &Arguments, folder: &ModelFolder, config: &LlamaConfig) -> Result<Self> {
        let needs_none = |path: &Path| path.extension().is_some_and(|extension| extension == "safetensors");
        let all_ready = needs_none(&arguments.data) && arguments.eval_data.as_deref().is_none_or(needs_none);
        if all_ready && arguments.sample_prompt.is_empty() {
            return Ok(Self { parts: None });
        }
        let encoder = TextEncoder::new(folder.tokenizer.as_deref(), config.vocab_size)
            .with_context(|| format!("{}: cannot be turned into tokens", arguments.data.display()))?;
        let special_tokens = SpecialTokens::read(folder, &encoder)?;
        let template = ChatTemplate::find(&folder.directory, special_tokens.by_name.clone())?;
        let format = template.map_or(PromptFormat::Alpaca, |template| {
            PromptFormat::Template(Box::new(template))
        });
        Ok(Self {
            parts: Some((encoder, special_tokens, format)),
        })
    }

    /// Reads what is trained on, and what is evaluated on.
    fn data(&self, arguments: &Arguments, config: &LlamaConfig) -> Result<(TrainingData, Option<TrainingData>)> {
        let read = |path: &Path, held_out: f64| {
            let examples = self
                .parts
                .as_ref()
                .map(|(encoder, special_tokens, format)| ExampleEncoder {
                    encoder,
                    format,
                    special_tokens,
                });
            let options = DataOptions {
                examples,
                vocab_size: config.vocab_size,
                sequence_length: arguments.sequence_length,
                packing: arguments.packing,
                held_out,
            };
            TrainingData::read(path, &options)
        };
        let divided = read(&arguments.data, arguments.eval_fraction)?;
        let held_out = match &arguments.eval_data {
            Some(path) => Some(read(path, 0.0)?.training),
            None => divided.held_out,
        };
        Ok((divided.training, held_out))
    }

    fn sampler(self, arguments: &Arguments, data: &TrainingData) -> Result<Option<Sampler>> {
        let Some((encoder, special_tokens, format)) = self.parts.filter(|_| !arguments.sample_prompt.is_empty()) else {
            return Ok(None);
        };
        let sampler = Sampler {
            encoder,
            special_tokens,
            format: data.is_of_examples().then_some(format),
            prompts: arguments.sample_prompt.clone(),
            tokens: arguments.sample_tokens,
            temperature: arguments.temperature,
            seed: arguments.seed,
        };
        for prompt in &sampler.prompts {
            sampler.encode(prompt)?;
        }
        Ok(Some(sampler))
    }
}

/// Returns the rows per rank and micro-batch, and the number of optimizer steps.
fn shape_of_run(arguments: &Arguments, acc: &dyn Accelerator, rows: &TrainingData) -> Result<(usize, u64)> {
    /// Rows of one optimizer step; more are a slip of the pen.
    const MOST_ROWS: usize = 1 << 32;
    let (world, accumulation) = (acc.world().size, acc.accumulation().steps() as usize);
    let data = arguments.data.display();
    let parts = world.saturating_mul(accumulation);
    let batch_size = match (arguments.per_device_batch_size, rows.rows_per_step()) {
        (Some(batch_size), _) => batch_size,
        (None, Some(rows_per_step)) => {
            ensure!(
                rows_per_step % parts == 0,
                "{data}: {rows_per_step} rows per step cannot be divided over {world} ranks with \
                 {accumulation} micro-batches each; expected a multiple of {parts}"
            );
            rows_per_step / parts
        }
        (None, None) => 4,
    };
    let per_step = batch_size.checked_mul(parts).filter(|rows| *rows <= MOST_ROWS);
    let per_step = per_step.with_context(|| {
        format!("{batch_size} rows for each of {world} ranks with {accumulation} micro-batches are more than {MOST_ROWS} a step")
    })?;
    if let Some(rows_per_step) = rows.rows_per_step() {
        ensure!(
            per_step == rows_per_step,
            "{data}: has {rows_per_step} rows per step, but {batch_size} rows for each of {world} ranks with \
             {accumulation} micro-batches are {per_step}"
        );
    }
    ensure!(batch_size > 0, "--per_device_batch_size is 0, expected at least 1");
    ensure!(
        rows.len() >= world,
        "{data}: has {} rows of {} tokens, which is less than one for each of {world} ranks; use more data, shorter \
         rows or fewer ranks",
        rows.len(),
        rows.sequence_length()
    );
    let usual = if rows.rows_per_step().is_some() { 1.0 } else { 3.0 };
    let epochs = arguments.num_train_epochs.unwrap_or(usual);
    ensure!(
        epochs.is_finite() && epochs > 0.0,
        "--num_train_epochs is {epochs}, expected a positive number"
    );
    let steps = arguments
        .steps
        .unwrap_or((epochs * rows.len() as f64 / per_step as f64).ceil() as u64);
    ensure!(steps > 0, "--steps is 0, expected at least 1");
    ensure!(
        arguments.warmup_steps <= steps,
        "--warmup_steps is {}, more than the {steps} steps of the run",
        arguments.warmup_steps
    );
    Ok((batch_size, steps))
}
