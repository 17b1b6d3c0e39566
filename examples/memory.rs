//! Tells what a strategy costs in memory and traffic: trains a Llama with random weights for a few steps and compares
//! what its ranks count with what their processes hold.
//!
//! ```text
//! sconce launch --num_processes 4 --example memory -- --stage 3
//! sconce launch --num_processes 4 --use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
//!     --fsdp_sharding_strategy SHARD_GRAD_OP --example memory
//! ```
//!
//! Without `--stage` the launcher's flags say what is sharded, DeepSpeed's or FSDP's, and what `sconce estimate-memory` says of
//! such a run is told beside.
//!
//! Resident memory is the proportional set size that Linux tells in `/proc/self/smaps_rollup`: pages that several ranks
//! have mapped count once in all. What a rank holds before its model is made is subtracted.
//! The peak is that of samples during the steps, and may be higher than the highest sample.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use candle_core::{Device, Tensor};
use clap::Parser;
use sconce_core::memory_estimate::{MemoryEstimate, ModelShape, Workload};
use sconce_core::schedule::ConstantSchedule;
use sconce_core::{
    Accelerator, AcceleratorBuilder, AdamW, DataLoader, DataParallel, ReduceOp, TensorDataset, Traffic, Weights,
    ZeroStage,
};
use sconce_examples::models::{Llama, LlamaConfig};
use sconce_examples::report;

/// Measures the memory and traffic of a Llama with random weights.
#[derive(Debug, Parser)]
#[command(rename_all = "snake_case")]
struct Arguments {
    /// ZeRO stage, 0 to 3; by default what the launcher says.
    #[arg(long)]
    stage: Option<u8>,
    /// Decoder layers.
    #[arg(long, default_value_t = 12)]
    layers: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 768)]
    hidden: usize,
    /// Width of the feed-forward layers.
    #[arg(long, default_value_t = 2048)]
    intermediate: usize,
    /// Token ids.
    #[arg(long, default_value_t = 10_000)]
    vocabulary: usize,
    /// Tokens in each rank's row.
    #[arg(long, default_value_t = 16)]
    sequence: usize,
    /// Optimizer steps.
    #[arg(long, default_value_t = 3)]
    steps: usize,
}

fn main() -> ExitCode {
    let arguments: Arguments = match report::parse_arguments() {
        Ok(arguments) => arguments,
        Err(code) => return code,
    };
    let builder = AcceleratorBuilder::default();
    let builder = match arguments.stage {
        None => Ok(builder),
        Some(0) => Ok(builder.strategy(DataParallel)),
        Some(1) => Ok(builder.strategy(ZeroStage::One)),
        Some(2) => Ok(builder.strategy(ZeroStage::Two)),
        Some(3) => Ok(builder.strategy(ZeroStage::THREE)),
        Some(other) => Err(other),
    };
    match builder {
        Ok(builder) => report::run(builder.build(), |acc| run(&arguments, acc)),
        Err(stage) => {
            eprintln!("error: --stage is {stage}, expected 0 to 3");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments, acc: &dyn Accelerator) -> Result<()> {
    let world = acc.world().size;
    let before = resident()?;
    let model = Llama::new(&config(arguments), acc.var_builder(Weights::Random { seed: 1 })?)?;
    let rows = world * arguments.steps;
    let count = rows * arguments.sequence;
    let tokens: Vec<u32> = (0..count)
        .map(|number| (number * 7919 % arguments.vocabulary) as u32)
        .collect();
    let tokens = Tensor::from_vec(tokens, (rows, arguments.sequence), &Device::Cpu)?;
    let data = TensorDataset::new(vec![tokens])?;
    let (mut optimizer, mut loader, _) = acc.prepare(AdamW::default(), DataLoader::new(data, 1), ConstantSchedule)?;
    report::tell_of_model(acc);
    let volume = || acc.traffic().iter().map(Traffic::volume).sum::<u64>();
    let mut moved = 0;
    let sampler = PeakSampler::start();
    for batch in &mut loader {
        acc.accumulate();
        let before = volume();
        let tokens = &batch?[0];
        acc.backward(&model.loss(tokens, tokens)?)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        moved = volume() - before;
    }
    let peak = sampler.finish()?.saturating_sub(before);
    acc.wait_for_everyone()?;
    let held = resident()?.saturating_sub(before);
    acc.wait_for_everyone()?;
    let memory = acc.memory();
    let mut sums = [held as i64, memory.total() as i64];
    acc.communicator().all_reduce(&mut sums, ReduceOp::Sum)?;
    let shape = shape(arguments)?;
    let parameters = shape.elements();
    let line = serde_json::json!({
        "world": world,
        "sharding": format!("{:?}", acc.settings().sharding),
        "parameters": parameters,
        "elements_moved_per_parameter": if parameters > 0 { moved as f64 / parameters as f64 } else { 0.0 },
        "bytes_of_rank_0": {
            "parameters": memory.parameters,
            "masters": memory.masters,
            "gradients": memory.gradients,
            "optimizer_state": memory.optimizer_state,
            "on_disk": memory.on_disk,
            "buffers": memory.buffers,
            "gathered_peak": memory.gathered_peak,
            "spare": memory.spare,
        },
        "counted_mib_of_all_ranks": sums[1] >> 20,
        "resident_mib_of_all_ranks": sums[0] >> 20,
        "most_mib_of_rank_0": most_resident()? >> 20,
        "peak_mib_of_rank_0": peak >> 20,
        "estimated_peak_mib": estimate(arguments, &shape, acc)?.map(|bytes| bytes >> 20),
        "resident_of_counted": sums[0] as f64 / sums[1] as f64,
    });
    acc.print(line);
    Ok(())
}

/// Returns the model as shapes.
fn shape(arguments: &Arguments) -> Result<ModelShape> {
    let config = config(arguments);
    let text = serde_json::json!({
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
    });
    Ok(ModelShape::from_config(
        &text.to_string(),
        "this example's configuration".as_ref(),
    )?)
}

/// Returns what `sconce estimate-memory` says that a rank of this run takes; `None` with `--stage`, a strategy of the
/// program's own.
fn estimate(arguments: &Arguments, model: &ModelShape, acc: &dyn Accelerator) -> Result<Option<u64>> {
    let workload = Workload {
        ranks: acc.world().size,
        ranks_per_host: acc.world().local_size,
        precision: acc.settings().precision,
        sequence: Some(arguments.sequence),
        ..Workload::default()
    };
    let estimate = MemoryEstimate::of_run(model, &workload, acc.settings())?;
    Ok(estimate.map(|estimate| estimate.device_peak))
}

/// Looks at this process's memory again and again, on a thread of its own.
struct PeakSampler {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Result<u64>>,
}

impl PeakSampler {
    fn start() -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ends);
        let thread = std::thread::spawn(move || {
            let mut peak = 0;
            while !seen.load(Ordering::Relaxed) {
                peak = peak.max(resident()?);
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok(peak)
        });
        Self { ends, thread }
    }

    /// Returns the most bytes that were seen.
    fn finish(self) -> Result<u64> {
        self.ends.store(true, Ordering::Relaxed);
        self.thread
            .join()
            .map_err(|_| anyhow::anyhow!("the thread that looks at memory panicked"))?
    }
}

fn config(arguments: &Arguments) -> LlamaConfig {
    LlamaConfig {
        vocab_size: arguments.vocabulary,
        hidden_size: arguments.hidden,
        intermediate_size: arguments.intermediate,
        num_hidden_layers: arguments.layers,
        num_attention_heads: arguments.hidden / 64,
        num_key_value_heads: arguments.hidden / 64,
        head_dim: 64,
        max_position_embeddings: arguments.sequence,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        ..LlamaConfig::default()
    }
}

/// Returns the most memory that this process has had mapped at once, in bytes: activations included.
fn most_resident() -> Result<u64> {
    field("/proc/self/status", "VmHWM:")
}

/// Returns this process's share of the memory that it has mapped, in bytes.
fn resident() -> Result<u64> {
    field("/proc/self/smaps_rollup", "Pss:")
}

/// Returns a line's number of KiB in a file of Linux's, in bytes.
fn field(file: &str, name: &str) -> Result<u64> {
    let text = std::fs::read_to_string(file).with_context(|| format!("{file}: this example measures on Linux only"))?;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix(name) {
            let kib: u64 = rest
                .trim()
                .trim_end_matches("kB")
                .trim()
                .parse()
                .with_context(|| file.to_owned())?;
            return Ok(kib << 10);
        }
    }
    bail!("{file}: has no line {name}")
}
