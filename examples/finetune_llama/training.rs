//! The training loop.

use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use sconce_core::{
    Accelerator, AdamW, DataLoader, LinearSchedule, ParameterGroups, ParameterSet, PreparedLoader, ReduceOp,
};
use sconce_examples::huggingface::ModelFolder;
use sconce_examples::models::{Llama, LlamaAdapters, Reading};
use sconce_examples::report;
use sconce_examples::text::TrainingData;

use crate::arguments::Arguments;
use crate::evaluation::{EarlyStopping, evaluate};
use crate::log::{Log, StepValues};
use crate::run::Run;
use crate::samples::Sampler;

/// What is left of a run when it has been trained.
pub(crate) struct Trained {
    pub(crate) folder: ModelFolder,
    pub(crate) adapters: Option<LlamaAdapters>,
    /// Optimizer steps that were taken, those before a resume included.
    pub(crate) steps: u64,
}

/// Trains.
pub(crate) fn train(arguments: &Arguments, acc: &dyn Accelerator, run: Run) -> Result<Trained> {
    let (batch_size, steps) = (run.batch_size, run.steps);
    let config = hyper_parameters(arguments, acc, &run);
    let Run {
        folder,
        adapters,
        model,
        data,
        held_out,
        sampler,
        metrics,
        trackers,
        ..
    } = run;
    let token_mean = arguments.token_mean.unwrap_or(data.is_of_examples());
    let in_order = data.rows_per_step().is_some();
    let loader = DataLoader::new(data, batch_size).shuffle(!in_order);
    let schedule = LinearSchedule {
        warmup_steps: arguments.warmup_steps,
        total_steps: steps,
    };
    let (mut optimizer, mut loader, mut scheduler) = acc.prepare(rules(arguments), loader, schedule)?;
    let held_out = held_out.map(|rows| acc.prepare_loader(DataLoader::new(rows, batch_size)));
    let mut review = Review {
        every: arguments.eval_steps,
        held_out: held_out.transpose()?,
        stopping: EarlyStopping::new(arguments.early_stopping_patience, arguments.early_stopping_threshold),
        sampler,
    };
    report::tell_of_model(acc);
    let position = Arc::new(Mutex::new(0));
    acc.register_for_checkpointing("step", position.clone())?;
    if arguments.early_stopping_patience.is_some() {
        acc.register_for_checkpointing("early stopping", review.stopping.state())?;
    }
    resume(arguments, acc)?;
    let mut step = *position.lock().unwrap_or_else(PoisonError::into_inner);
    acc.init_trackers("finetune_llama", &config, trackers)?;
    let mut log = Log::new(acc, metrics, steps, arguments.logging_steps);

    let mut window = Window::default();
    'training: while step < steps && !review.stopping.is_over() {
        for batch in &mut loader {
            acc.accumulate();
            let batch = batch?;
            let reading = Reading {
                train: true,
                document_starts: batch.document_starts,
            };
            let loss = acc.autocast(|| model.loss_of(&batch.tokens, &batch.labels, &reading))?;
            let weight = match token_mean {
                true => Llama::predictions(&batch.labels)? as f64,
                false => 1.0,
            };
            match token_mean {
                true => acc.backward_weighted(&loss, weight)?,
                false => acc.backward(&loss)?,
            }
            window.add(&loss, weight, batch.tokens_read)?;
            let Some(grad_norm) = acc.clip_grad_norm(arguments.max_grad_norm)? else {
                continue;
            };
            let lr = optimizer.learning_rate();
            optimizer.step()?;
            scheduler.step()?;
            optimizer.zero_grad()?;

            let (loss, tokens) = std::mem::take(&mut window).over_ranks(acc)?;
            // A step that overflows is skipped, and the scale of the loss lowered.
            let used_norm = if optimizer.step_was_skipped() { 0.0 } else { grad_norm };
            acc.together(check_finite(step, loss, used_norm))?;
            let values = StepValues {
                loss,
                grad_norm,
                lr,
                tokens,
            };
            log.step(acc, step, &values)?;
            step += 1;
            *position.lock().unwrap_or_else(PoisonError::into_inner) = step;
            // Before the checkpoint, which holds what comes of it.
            if review.is_due(step, steps) {
                review.run(acc, &model, step - 1, &mut log)?;
            }
            if arguments.checkpointing_steps > 0 && step.is_multiple_of(arguments.checkpointing_steps) {
                acc.save_checkpoint_in_background()?;
            }
            if review.stopping.is_over() {
                acc.print(format_args!("ended early: the evaluation loss has stopped falling"));
                break 'training;
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
    Ok(Trained {
        folder,
        adapters,
        steps: step,
    })
}

fn rules(arguments: &Arguments) -> ParameterGroups {
    let rule = AdamW {
        learning_rate: arguments.lr,
        beta1: arguments.adam_beta1,
        beta2: arguments.adam_beta2,
        epsilon: arguments.adam_epsilon,
        weight_decay: arguments.weight_decay,
        ..AdamW::default()
    };
    let rules = ParameterGroups::new(rule.clone());
    if !arguments.no_decay_norms_and_biases {
        return rules;
    }
    let undecayed = AdamW {
        weight_decay: 0.0,
        ..rule
    };
    rules.with(ParameterSet::norms_and_biases(), undecayed)
}

/// The losses of an accumulation window on this rank.
#[derive(Default)]
struct Window {
    /// Of losses, each times its weight.
    sum: f64,
    weights: f64,
    tokens: usize,
}

impl Window {
    fn add(&mut self, loss: &Tensor, weight: f64, tokens: usize) -> Result<()> {
        self.sum += loss.to_dtype(DType::F64)?.to_scalar::<f64>()? * weight;
        self.weights += weight;
        self.tokens += tokens;
        Ok(())
    }

    /// Returns the mean over all ranks, and the tokens that all have read.
    fn over_ranks(self, acc: &dyn Accelerator) -> Result<(f64, u64)> {
        let mut sums = [self.sum, self.weights, self.tokens as f64];
        acc.communicator().all_reduce(&mut sums, ReduceOp::Sum)?;
        Ok((sums[0] / sums[1].max(f64::MIN_POSITIVE), sums[2] as u64))
    }
}

/// What is looked at between steps: the loss on held-out data, and answers.
struct Review {
    /// Steps between two.
    every: Option<u64>,
    held_out: Option<PreparedLoader<TrainingData>>,
    stopping: EarlyStopping,
    sampler: Option<Sampler>,
}

impl Review {
    fn is_due(&self, step: u64, steps: u64) -> bool {
        let is_any = self.held_out.is_some() || self.sampler.is_some();
        is_any && (step == steps || self.every.is_some_and(|every| step.is_multiple_of(every)))
    }

    fn run(&mut self, acc: &dyn Accelerator, model: &Llama, step: u64, log: &mut Log) -> Result<()> {
        if let Some(held_out) = &mut self.held_out {
            let evaluation = evaluate(acc, model, held_out)?;
            self.stopping.see(evaluation.loss);
            log.evaluation(acc, step, &evaluation)?;
        }
        if let Some(sampler) = &self.sampler {
            for prompt in &sampler.prompts {
                let answer = sampler.answer(acc, model, prompt, step)?;
                log.sample(step, prompt, &answer)?;
            }
        }
        Ok(())
    }
}

/// What trackers are told of a run: what it is called with, and what follows from that.
fn hyper_parameters(arguments: &Arguments, acc: &dyn Accelerator, run: &Run) -> serde_json::Value {
    let mut values = serde_json::json!({
        "model_dir": arguments.model_dir,
        "data": arguments.data,
        "ranks": acc.world().size,
        "steps": run.steps,
        "per_device_batch_size": run.batch_size,
        "gradient_accumulation_steps": acc.accumulation().steps(),
        "sequence_length": run.data.sequence_length(),
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
    });
    if let Some(adapters) = &run.adapters {
        values["lora"] = serde_json::json!(adapters.peft_config(None));
    }
    values
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
