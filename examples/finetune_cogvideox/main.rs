//! Fine-tunes a CogVideoX video transformer on encoded videos, on any number of ranks.
//!
//! ```text
//! sconce launch --num_processes 2 --example finetune_cogvideox -- --model_path DIR --data_root DIR --output_dir OUT
//! ```
//!
//! The training loop is [`train`]; what comes before it reads input, what comes after writes the result. `docs/cogvideox.md` is
//! the page of this program.

mod arguments;
mod optimization;
mod result;
mod validation;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use candle_core::DType;
use sconce_core::nn::LoraLinear;
use sconce_core::trackers::Trackers;
use sconce_core::{
    Accelerator, AcceleratorBuilder, Checkpoints, DataLoader, Dataset as _, ReduceOp, UnitPolicy, WeightFiles, Weights,
};
use sconce_examples::diffusion::{NoiseSchedule, VideoSamples, velocity_loss};
use sconce_examples::huggingface::ModelFolder;
use sconce_examples::models::{Adapters, CogVideoXConfig, CogVideoXTransformer};
use sconce_examples::report;

use arguments::{Arguments, ModelType};
use optimization::{Rates, Rule};
use validation::Validator;

fn main() -> ExitCode {
    let arguments: Arguments = match report::parse_arguments() {
        Ok(arguments) => arguments,
        Err(code) => return code,
    };
    report::run(accelerator(&arguments).build(), |acc| run(&arguments, acc))
}

/// Sets up the accelerator as CogVideoX's trainer does.
fn accelerator(arguments: &Arguments) -> AcceleratorBuilder {
    let mut builder = AcceleratorBuilder::default()
        .seed(arguments.seed)
        .timeout(Duration::from_secs(arguments.nccl_timeout))
        .find_unused_parameters(true);
    if let Some(steps) = arguments.gradient_accumulation_steps {
        builder = builder.gradient_accumulation_steps(steps);
    }
    if let Some(precision) = arguments.mixed_precision {
        builder = builder.mixed_precision(precision.into());
    }
    if let Some(output) = &arguments.output_dir {
        builder = builder.checkpoints(Checkpoints {
            folder: output.join("checkpoints"),
            total_limit: Some(arguments.checkpointing_limit),
        });
    }
    if arguments.gradient_checkpointing {
        let blocks = UnitPolicy::matching(|part| part.class == "CogVideoXBlock");
        builder = builder.recompute(blocks);
    }
    match arguments.training_type {
        arguments::TrainingType::Lora => builder
            .frozen(LoraLinear::base_parameters())
            .keep_in_f32(LoraLinear::adapter_parameters())
            .save_frozen(false),
        arguments::TrainingType::Sft => builder.frozen(CogVideoXTransformer::constants()),
    }
}

/// What a run works on, checked.
struct Run {
    folder: ModelFolder,
    adapters: Option<Adapters>,
    model: CogVideoXTransformer,
    schedule: NoiseSchedule,
    samples: VideoSamples,
    steps: u64,
    validation: Option<(Validator, u64)>,
    trackers: Trackers,
}

fn run(arguments: &Arguments, acc: &dyn Accelerator) -> Result<()> {
    let run = acc.together(prepare(arguments, acc))?;
    let steps = run.steps;
    let (folder, adapters) = train(arguments, acc, run)?;
    if arguments.report {
        report::print(acc, steps);
    }
    match &arguments.output_dir {
        Some(output) => result::write(acc, &folder, adapters.as_ref(), output),
        None => Ok(()),
    }
}

/// Reads and checks everything that a run needs; no rank waits for another here.
fn prepare(arguments: &Arguments, acc: &dyn Accelerator) -> Result<Run> {
    arguments.check()?;
    let adapters = arguments.adapters()?;
    if let Some(output) = arguments.output_dir.as_ref().filter(|_| acc.is_main_process()) {
        result::check_is_free(adapters.as_ref(), output)?;
    }
    let folder = ModelFolder::open(&arguments.model_path.join("transformer"))?;
    let config = CogVideoXConfig::from_model_folder(&folder)?;
    let schedule = NoiseSchedule::read(&arguments.model_path.join("scheduler/scheduler_config.json"))?;
    let with_images = arguments.model_type == ModelType::I2v;
    let samples = VideoSamples::open(&arguments.data_root(), with_images)?;
    let shape = samples.latent_shape();
    arguments.check_against(&config, shape, samples.text_shape())?;
    let steps = steps_of_run(arguments, acc, samples.len())?;
    let validation = match (arguments.validation()?, &arguments.output_dir) {
        (Some(wanted), Some(output)) => {
            let sampling = (
                arguments.validation_inference_steps,
                arguments.guidance_scale,
                arguments.seed,
            );
            let validator = Validator::open(&wanted.prompts, shape, with_images, sampling, output)?;
            Some((validator, wanted.every))
        }
        _ => None,
    };
    let files = WeightFiles::open(&folder.weights)?;
    let weights = match &adapters {
        Some(_) => Weights::FilesAndRandom {
            files,
            drawn: LoraLinear::adapter_parameters(),
            seed: arguments.seed,
        },
        None => Weights::Files(files),
    };
    let model = CogVideoXTransformer::new(&config, adapters.as_ref(), acc.var_builder(weights)?)?;
    let trackers = match (arguments.report_to.as_deref(), &arguments.output_dir) {
        (Some(names), Some(output)) if names != "none" => {
            Trackers::from_names(names, output.join("logs")).context("--report_to")?
        }
        _ => Trackers::default(),
    };
    Ok(Run {
        folder,
        adapters,
        model,
        schedule,
        samples,
        steps,
        validation,
        trackers,
    })
}

/// Returns the number of optimizer steps.
fn steps_of_run(arguments: &Arguments, acc: &dyn Accelerator, samples: usize) -> Result<u64> {
    let world = acc.world().size;
    ensure!(
        samples >= world,
        "{}: has {samples} samples, which is less than one for each of {world} ranks; use more data or fewer ranks",
        arguments.data_root().display()
    );
    let batches = samples.div_ceil(world).div_ceil(arguments.batch_size) as u64;
    let per_epoch = batches.div_ceil(acc.accumulation().steps());
    Ok(arguments.train_steps.unwrap_or(arguments.train_epochs * per_epoch))
}

/// Trains; returns what the result is written with.
fn train(arguments: &Arguments, acc: &dyn Accelerator, run: Run) -> Result<(ModelFolder, Option<Adapters>)> {
    let Run {
        folder,
        adapters,
        model,
        schedule,
        samples,
        steps,
        validation,
        trackers,
    } = run;
    let rule = Rule::new(arguments, acc.settings());
    let rates = Rates::new(arguments, acc.settings(), steps);
    let loader = DataLoader::new(samples, arguments.batch_size)
        .shuffle(true)
        .prefetch(arguments.num_workers);
    let (mut optimizer, mut loader, mut scheduler) = acc.prepare(rule, loader, rates)?;
    report::tell_of_model(acc);
    if let Some(adapters) = adapters.clone() {
        let (engine, is_main) = (Arc::clone(acc.engine()), acc.is_main_process());
        acc.register_save_state_pre_hook(move |folder| {
            Ok(result::write_adapters(&engine, &adapters, folder, is_main)?)
        });
    }
    let position = Arc::new(Mutex::new(0));
    acc.register_for_checkpointing("step", position.clone())?;
    resume(arguments, acc)?;
    let mut step = *position.lock().unwrap_or_else(PoisonError::into_inner);
    acc.init_trackers(
        &arguments.tracker_name,
        &hyper_parameters(arguments, acc, steps),
        trackers,
    )?;
    let dtype = acc.settings().parameter_dtype();

    let mut losses = Vec::new();
    let mut since = Instant::now();
    while step < steps {
        for batch in &mut loader {
            acc.accumulate();
            let batch = batch?;
            let draws = (arguments.seed, step);
            let loss = acc.autocast(|| velocity_loss(&model, &schedule, &batch, draws, dtype))?;
            acc.backward(&loss)?;
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
            acc.log(&[("loss", loss[0]), ("grad_norm", grad_norm), ("lr", lr)], step)?;
            report::tell_of_trackers(acc);
            if step.is_multiple_of(arguments.logging_steps) || step + 1 == steps {
                let seconds = since.elapsed().as_secs_f64();
                since = Instant::now();
                let loss = loss[0];
                acc.print(format_args!(
                    "step {step:>4}/{steps}  loss {loss:.4}  grad_norm {grad_norm:.3}  lr {lr:.2e}  {seconds:.1} s"
                ));
            }
            step += 1;
            *position.lock().unwrap_or_else(PoisonError::into_inner) = step;
            let is_due = |every: u64| every > 0 && step.is_multiple_of(every);
            if arguments.output_dir.is_some() && is_due(arguments.checkpointing_steps) {
                acc.save_checkpoint_in_background()?;
            }
            if let Some((validator, every)) = &validation
                && (is_due(*every) || step == steps)
            {
                validator.run(acc, &model, &schedule, step)?;
            }
            if step == steps {
                break;
            }
        }
    }
    acc.finish_saving()?;
    acc.end_training()?;
    report::tell_of_trackers(acc);
    Ok((folder, adapters))
}

/// What trackers are told of a run: what it is called with, and what follows from that.
fn hyper_parameters(arguments: &Arguments, acc: &dyn Accelerator, steps: u64) -> serde_json::Value {
    serde_json::json!({
        "model_path": arguments.model_path,
        "data_root": arguments.data_root(),
        "training_type": format!("{:?}", arguments.training_type).to_lowercase(),
        "ranks": acc.world().size,
        "train_steps": steps,
        "batch_size": arguments.batch_size,
        "gradient_accumulation_steps": acc.accumulation().steps(),
        "learning_rate": arguments.learning_rate,
        "lr_warmup_steps": arguments.lr_warmup_steps,
        "max_grad_norm": arguments.max_grad_norm,
        "seed": arguments.seed,
    })
}

/// Goes on from a checkpoint, if that is asked for and there is one.
fn resume(arguments: &Arguments, acc: &dyn Accelerator) -> Result<()> {
    let Some(from) = &arguments.resume_from_checkpoint else {
        return Ok(());
    };
    let loaded = match from.as_os_str() == "latest" {
        true => acc.load_latest()?,
        false => Some(acc.load_state(from)?),
    };
    let Some(loaded) = loaded else {
        acc.print("no checkpoint yet: from the beginning");
        return Ok(());
    };
    for skipped in &loaded.skipped {
        acc.print(format_args!("skipped: {skipped}"));
    }
    acc.print(format_args!("going on from {}", loaded.folder.display()));
    Ok(())
}

/// Refuses to go on with numbers that are none: every later step and the model would be lost too.
fn check_finite(step: u64, loss: f64, grad_norm: f64) -> Result<()> {
    ensure!(
        loss.is_finite() && grad_norm.is_finite(),
        "step {step}: the loss is {loss} and the norm of the gradients {grad_norm}; no model is written. A lower \
         --learning_rate may help"
    );
    Ok(())
}
