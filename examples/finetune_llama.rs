//! Fine-tunes a HuggingFace Llama on text or token rows, on any number of ranks.
//!
//! ```text
//! sconce launch --num_processes 2 --example finetune_llama -- --model_dir DIR --data FILE --output_dir OUT
//! ```
//!
//! The training loop is [`train`]; what comes before it reads input, what comes after writes the result.

use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use candle_core::DType;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use sconce_core::trackers::Trackers;
use sconce_core::{
    Accelerator, AcceleratorBuilder, AdamW, Checkpoints, DataLoader, Dataset as _, LinearSchedule, ParameterGroups,
    ParameterSet, Profile, ReduceOp, WeightFiles, Weights,
};
use sconce_examples::huggingface::{ModelFolder, check_model_folder_is_free, write_model_folder};
use sconce_examples::models::{Llama, LlamaConfig};
use sconce_examples::report;
use sconce_examples::text::TokenRows;

/// Fine-tunes a HuggingFace Llama.
#[derive(Debug, Parser)]
#[command(rename_all = "snake_case", allow_negative_numbers = true)]
struct Arguments {
    /// Folder with config.json and safetensors weights; the small model shipped with the examples by default.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tiny-llama"), hide_default_value = true)]
    model_dir: PathBuf,
    /// Text, JSON lines with a `text` field, or safetensors with `tokens` [steps, global batch, sequence] and optional
    /// `labels`; a short text shipped with the examples by default.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/text/declaration_of_independence.txt"), hide_default_value = true)]
    data: PathBuf,
    /// Tokens in a row of text [default: 128].
    #[arg(long)]
    sequence_length: Option<usize>,
    /// Optimizer steps; by default three times through a text, once through a file of tokens.
    #[arg(long)]
    steps: Option<u64>,
    /// Rows that one rank takes at a time; by default 4 of a text, the rank's share of a step of a file of tokens.
    #[arg(long)]
    per_device_batch_size: Option<usize>,
    /// Micro-batches whose gradients add up to one optimizer step; by default what the launcher says, or 1.
    #[arg(long)]
    gradient_accumulation_steps: Option<u64>,
    /// Average over all tokens of a step that have a label, instead of over the means of micro-batches.
    #[arg(long)]
    token_mean: bool,
    /// Highest learning rate.
    #[arg(long, default_value_t = 5e-5)]
    lr: f64,
    /// Decay of the first moment.
    #[arg(long, default_value_t = 0.9)]
    adam_beta1: f64,
    /// Decay of the second moment.
    #[arg(long, default_value_t = 0.999)]
    adam_beta2: f64,
    /// Added to the root of the second moment.
    #[arg(long, default_value_t = 1e-8)]
    adam_epsilon: f64,
    /// Decoupled weight decay of every parameter.
    #[arg(long, default_value_t = 0.0)]
    weight_decay: f64,
    /// Exempts norms and biases from weight decay.
    #[arg(long)]
    no_decay_norms_and_biases: bool,
    /// Optimizer steps over which the learning rate rises from 0; then it falls to 0 at the last step.
    #[arg(long, default_value_t = 0)]
    warmup_steps: u64,
    /// Largest global norm of the gradients.
    #[arg(long, default_value_t = 1.0)]
    max_grad_norm: f64,
    /// Seed for the order of rows of a text.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// New or empty folder for the trained model.
    #[arg(long)]
    output_dir: Option<PathBuf>,
    /// File for one JSON line per optimizer step: step, loss, grad_norm, lr, tokens_per_second.
    #[arg(long)]
    metrics_out: Option<PathBuf>,
    /// Experiment trackers that get the same numbers, and the run's settings: jsonl, csv, tensorboard, wandb, mlflow, dvclive
    /// (and trackio, with the feature of that name) with commas between, or all.
    #[arg(long, value_name = "NAME[,NAME]")]
    report_to: Option<String>,
    /// Folder for what trackers write.
    #[arg(long, default_value = "logs", requires = "report_to")]
    logging_dir: PathBuf,
    /// Print at the end what each rank holds and moves.
    #[arg(long)]
    report: bool,
    /// Folder of numbered checkpoints.
    #[arg(long)]
    checkpoints: Option<PathBuf>,
    /// Optimizer steps between two checkpoints; 0 for none.
    #[arg(long, default_value_t = 0, requires = "checkpoints")]
    checkpointing_steps: u64,
    /// How many checkpoints are kept; all by default.
    #[arg(long, requires = "checkpoints")]
    checkpoints_total_limit: Option<usize>,
    /// Go on from a checkpoint: its folder, or `latest` for the newest complete one in --checkpoints, if there is one.
    #[arg(long)]
    resume_from_checkpoint: Option<PathBuf>,
    /// Folder for a trace of where each rank's time goes, for Chrome (about:tracing) or Perfetto.
    #[arg(long)]
    profile: Option<PathBuf>,
    /// Optimizer steps between two printed lines.
    #[arg(long, default_value_t = 10)]
    logging_steps: u64,
}

/// What a run works on, checked.
struct Run {
    folder: ModelFolder,
    model: Llama,
    rows: TokenRows,
    batch_size: usize,
    steps: u64,
    metrics: Option<File>,
    trackers: Trackers,
}

fn main() -> ExitCode {
    let arguments: Arguments = match report::parse_arguments() {
        Ok(arguments) => arguments,
        Err(code) => return code,
    };
    let mut builder = AcceleratorBuilder::default().seed(arguments.seed);
    if let Some(steps) = arguments.gradient_accumulation_steps {
        builder = builder.gradient_accumulation_steps(steps);
    }
    if let Some(folder) = &arguments.checkpoints {
        builder = builder.checkpoints(Checkpoints {
            folder: folder.clone(),
            total_limit: arguments.checkpoints_total_limit,
        });
    }
    report::run(builder.build(), |acc| run(&arguments, acc))
}

fn run(arguments: &Arguments, acc: &dyn Accelerator) -> Result<()> {
    let run = acc.together(prepare(arguments, acc))?;
    let steps = run.steps;
    let profile = match &arguments.profile {
        Some(folder) => Some(acc.together(acc.profile(folder))?),
        None => None,
    };
    let folder = train(arguments, acc, run)?;
    acc.together(profile.map_or(Ok(()), Profile::finish))?;
    if arguments.report {
        report::print(acc, steps);
    }
    if let Some(directory) = &arguments.output_dir {
        let weights = acc.state_dict()?;
        let write = || write_model_folder(directory, &folder, weights);
        acc.together(if acc.is_main_process() { write() } else { Ok(()) })?;
        acc.print(format_args!("wrote {}", directory.display()));
    }
    Ok(())
}

/// Reads and checks everything that a run needs; no rank waits for another here.
fn prepare(arguments: &Arguments, acc: &dyn Accelerator) -> Result<Run> {
    ensure!(arguments.logging_steps > 0, "--logging_steps is 0, expected at least 1");
    if let Some(directory) = arguments.output_dir.as_ref().filter(|_| acc.is_main_process()) {
        check_model_folder_is_free(directory)?;
    }
    let folder = ModelFolder::open(&arguments.model_dir)?;
    let config = LlamaConfig::from_model_folder(&folder)?;
    let rows = TokenRows::read(
        &arguments.data,
        folder.tokenizer.as_deref(),
        config.vocab_size,
        arguments.sequence_length,
    )?;
    let (batch_size, steps) = shape_of_run(arguments, acc, &rows)?;
    let weights = Weights::Files(WeightFiles::open(&folder.weights)?);
    let model = Llama::new(&config, acc.var_builder(weights)?)?;
    let metrics = match arguments.metrics_out.as_ref().filter(|_| acc.is_main_process()) {
        Some(path) => Some(File::create(path).with_context(|| format!("{}: cannot be written", path.display()))?),
        None => None,
    };
    let trackers = match &arguments.report_to {
        Some(names) => Trackers::from_names(names, &arguments.logging_dir).context("--report_to")?,
        None => Trackers::default(),
    };
    Ok(Run {
        folder,
        model,
        rows,
        batch_size,
        steps,
        metrics,
        trackers,
    })
}

/// Returns the rows per rank and micro-batch, and the number of optimizer steps.
fn shape_of_run(arguments: &Arguments, acc: &dyn Accelerator, rows: &TokenRows) -> Result<(usize, u64)> {
    /// Rows of one optimizer step; more are a slip of the pen.
    const MOST_ROWS: usize = 1 << 32;
    let (world, accumulation) = (acc.world().size, acc.accumulation().steps() as usize);
    let data = arguments.data.display();
    let parts = world.saturating_mul(accumulation);
    let batch_size = match (arguments.per_device_batch_size, rows.rows_per_step) {
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
    if let Some(rows_per_step) = rows.rows_per_step {
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
        rows.sequence_length
    );
    let epochs = if rows.rows_per_step.is_some() { 1 } else { 3 };
    let steps = arguments
        .steps
        .unwrap_or((epochs * rows.len()).div_ceil(per_step) as u64);
    ensure!(steps > 0, "--steps is 0, expected at least 1");
    ensure!(
        arguments.warmup_steps <= steps,
        "--warmup_steps is {}, more than the {steps} steps of the run",
        arguments.warmup_steps
    );
    Ok((batch_size, steps))
}

/// Trains; returns the folder whose model was trained.
fn train(arguments: &Arguments, acc: &dyn Accelerator, run: Run) -> Result<ModelFolder> {
    let Run {
        folder,
        model,
        rows,
        batch_size,
        steps,
        metrics,
        trackers,
    } = run;
    let in_order = rows.rows_per_step.is_some();
    let rule = AdamW {
        learning_rate: arguments.lr,
        beta1: arguments.adam_beta1,
        beta2: arguments.adam_beta2,
        epsilon: arguments.adam_epsilon,
        weight_decay: arguments.weight_decay,
        ..AdamW::default()
    };
    let mut rules = ParameterGroups::new(rule.clone());
    if arguments.no_decay_norms_and_biases {
        let undecayed = AdamW {
            weight_decay: 0.0,
            ..rule
        };
        rules = rules.with(ParameterSet::norms_and_biases(), undecayed);
    }
    let tokens = (batch_size * rows.sequence_length * acc.world().size) as u64 * acc.accumulation().steps();
    let loader = DataLoader::new(rows, batch_size).shuffle(!in_order);
    let schedule = LinearSchedule {
        warmup_steps: arguments.warmup_steps,
        total_steps: steps,
    };
    let (mut optimizer, mut loader, mut scheduler) = acc.prepare(rules, loader, schedule)?;
    report::tell_of_model(acc);
    let position = Arc::new(Mutex::new(0));
    acc.register_for_checkpointing("step", position.clone())?;
    resume(arguments, acc)?;
    let mut step = *position.lock().unwrap_or_else(PoisonError::into_inner);
    let config = hyper_parameters(arguments, acc, batch_size, steps);
    acc.init_trackers("finetune_llama", &config, trackers)?;
    let mut log = Log::new(acc, metrics, steps, arguments.logging_steps, tokens);

    let mut losses = Vec::new();
    while step < steps {
        for batch in &mut loader {
            acc.accumulate();
            let batch = batch?;
            let loss = model.loss(&batch.tokens, &batch.labels)?;
            match arguments.token_mean {
                true => acc.backward_weighted(&loss, Llama::predictions(&batch.labels)? as f64)?,
                false => acc.backward(&loss)?,
            }
            losses.push(loss.to_dtype(DType::F64)?.to_scalar::<f64>()?);
            let Some(grad_norm) = acc.clip_grad_norm(arguments.max_grad_norm)? else {
                continue;
            };
            let lr = optimizer.learning_rate();
            optimizer.step()?;
            scheduler.step()?;
            optimizer.zero_grad()?;

            let mut loss = [losses.iter().sum::<f64>() / losses.len() as f64];
            losses.clear();
            acc.communicator().all_reduce(&mut loss, ReduceOp::Mean)?;
            // A step that overflows is skipped, and the scale of the loss lowered.
            let used_norm = if optimizer.step_was_skipped() { 0.0 } else { grad_norm };
            acc.together(check_finite(step, loss[0], used_norm))?;
            log.step(acc, step, loss[0], grad_norm, lr)?;
            step += 1;
            *position.lock().unwrap_or_else(PoisonError::into_inner) = step;
            if arguments.checkpointing_steps > 0 && step.is_multiple_of(arguments.checkpointing_steps) {
                acc.save_checkpoint_in_background()?;
            }
            if step == steps {
                break;
            }
        }
    }
    acc.finish_saving()?;
    log.finish();
    acc.end_training()?;
    report::tell_of_trackers(acc);
    Ok(folder)
}

/// What trackers are told of a run: what it is called with, and what follows from that.
fn hyper_parameters(arguments: &Arguments, acc: &dyn Accelerator, batch_size: usize, steps: u64) -> serde_json::Value {
    serde_json::json!({
        "model_dir": arguments.model_dir,
        "data": arguments.data,
        "ranks": acc.world().size,
        "steps": steps,
        "per_device_batch_size": batch_size,
        "gradient_accumulation_steps": acc.accumulation().steps(),
        "warmup_steps": arguments.warmup_steps,
        "max_grad_norm": arguments.max_grad_norm,
        "seed": arguments.seed,
        "adamw": {
            "lr": arguments.lr,
            "beta1": arguments.adam_beta1,
            "beta2": arguments.adam_beta2,
            "epsilon": arguments.adam_epsilon,
            "weight_decay": arguments.weight_decay,
        },
    })
}

/// Goes on from a checkpoint, if that is asked for and there is one.
fn resume(arguments: &Arguments, acc: &dyn Accelerator) -> Result<()> {
    let Some(from) = &arguments.resume_from_checkpoint else {
        return Ok(());
    };
    let loaded = if from.as_os_str() == "latest" {
        ensure!(
            arguments.checkpoints.is_some(),
            "--resume_from_checkpoint latest needs --checkpoints"
        );
        acc.load_latest()?
    } else {
        Some(acc.load_state(from)?)
    };
    let Some(loaded) = loaded else {
        acc.print("no checkpoint yet: from the beginning");
        return Ok(());
    };
    loaded
        .skipped
        .iter()
        .for_each(|skipped| acc.print(format_args!("skipped: {skipped}")));
    acc.print(format_args!("going on from {}", loaded.folder.display()));
    Ok(())
}

/// Refuses to go on with numbers that are none: every later step and the model would be lost too.
fn check_finite(step: u64, loss: f64, grad_norm: f64) -> Result<()> {
    ensure!(
        loss.is_finite() && grad_norm.is_finite(),
        "step {step}: the loss is {loss} and the norm of the gradients {grad_norm}; no model is written. A lower --lr, a \
         smaller --max_grad_norm or a larger --adam_epsilon may help"
    );
    Ok(())
}

/// Tells the user of the run, on rank 0: a progress bar on a terminal, lines elsewhere, JSON lines in a file.
struct Log {
    is_main: bool,
    bar: ProgressBar,
    metrics: Option<File>,
    steps: u64,
    every: u64,
    tokens_per_step: u64,
    last: Instant,
    /// Time and steps since the last printed line.
    since_line: (Duration, u64),
}

impl Log {
    fn new(acc: &dyn Accelerator, metrics: Option<File>, steps: u64, every: u64, tokens_per_step: u64) -> Self {
        let is_main = acc.is_main_process();
        let bar = if is_main && std::io::stderr().is_terminal() {
            ProgressBar::new(steps)
        } else {
            ProgressBar::hidden()
        };
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed}<{eta} {msg}") {
            bar.set_style(style);
        }
        let start = (Duration::ZERO, 0);
        Self {
            is_main,
            bar,
            metrics,
            steps,
            every,
            tokens_per_step,
            last: Instant::now(),
            since_line: start,
        }
    }

    fn step(&mut self, acc: &dyn Accelerator, step: u64, loss: f64, grad_norm: f64, lr: f64) -> Result<()> {
        let took = self.last.elapsed();
        self.last = Instant::now();
        let tokens_per_second = self.tokens_per_step as f64 / took.as_secs_f64();
        let memory = acc.memory();
        let held = memory.parameters + memory.masters + memory.gradients + memory.optimizer_state + memory.buffers;
        let values = [
            ("loss", loss),
            ("grad_norm", grad_norm),
            ("lr", lr),
            ("tokens_per_second", tokens_per_second),
            ("memory_mib", held as f64 / f64::from(1 << 20)),
        ];
        acc.log(&values, step)?;
        report::tell_of_trackers(acc);
        if let Some(file) = &mut self.metrics {
            let line = serde_json::json!({
                "step": step,
                "loss": loss,
                "grad_norm": grad_norm,
                "lr": lr,
                "tokens_per_second": tokens_per_second,
            });
            writeln!(file, "{line}").context("writing --metrics_out")?;
        }
        if !self.is_main {
            return Ok(());
        }
        self.since_line = (self.since_line.0 + took, self.since_line.1 + 1);
        self.bar.set_position(step + 1);
        if step.is_multiple_of(self.every) || step + 1 == self.steps {
            let tokens = (self.tokens_per_step * self.since_line.1) as f64 / self.since_line.0.as_secs_f64();
            let line = format!(
                "step {step:>4}/{}  loss {loss:.4}  grad_norm {grad_norm:.3}  lr {lr:.2e}  {tokens:.0} tokens/s",
                self.steps
            );
            self.since_line = (Duration::ZERO, 0);
            if self.bar.is_hidden() {
                println!("{line}");
            } else {
                self.bar.println(line);
            }
        }
        Ok(())
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
