//! Fine-tunes a HuggingFace Llama, Mistral, Qwen2 or Qwen3 on text, or on questions and answers, on any number of ranks.
//!
//! ```text
//! sconce launch --num_processes 2 --example finetune_llama -- --model_dir DIR --data FILE --output_dir OUT
//! ```
//!
//! The training loop is [`training`]; what comes before it reads input ([`run`]), what comes after writes the result
//! ([`output`]). Nothing here knows how training is distributed: that is the launcher's business, by flags or by a file of
//! `configs/`.

mod arguments;
mod evaluation;
mod log;
mod output;
mod run;
mod samples;
mod training;

use std::process::ExitCode;

use anyhow::Result;
use sconce_core::nn::LoraLinear;
use sconce_core::{Accelerator, AcceleratorBuilder, Checkpoints, Profile};
use sconce_examples::report;

use arguments::Arguments;

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
    if arguments.lora_r.is_some() {
        // Checkpoints hold what changes.
        builder = builder.frozen(LoraLinear::base_parameters()).save_frozen(false);
    }
    report::run(builder.build(), |acc| run(&arguments, acc))
}

fn run(arguments: &Arguments, acc: &dyn Accelerator) -> Result<()> {
    let run = acc.together(run::prepare(arguments, acc))?;
    let profile = match &arguments.profile {
        Some(folder) => Some(acc.together(acc.profile(folder))?),
        None => None,
    };
    let trained = training::train(arguments, acc, run)?;
    acc.together(profile.map_or(Ok(()), Profile::finish))?;
    if arguments.report {
        report::print(acc, trained.steps);
    }
    output::write(arguments, acc, &trained.folder, trained.adapters.as_ref())
}
