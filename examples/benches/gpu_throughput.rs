//! Tokens a second of training a Llama of about a billion parameters in bf16 on one GPU, as JSON lines.
//!
//! Carried by `cargo xtask gpu-check`; `xtask/peers/gpu_throughput.py` is the same in PyTorch. The share of the GPU's peak
//! counts what the model needs: for each token 6 operations for each parameter of a matrix, and 12 for each position that it
//! attends to, layer and element of the heads; what is computed again does not count (Chowdhery et al. 2022,
//! arXiv:2204.02311, appendix B, of causal attention).

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use clap::Parser;
use sconce_collectives::single;
use sconce_core::{AdamW, DataParallel, DeviceRequest, ShardingStrategy, Weights, World, ZeroStage};
use sconce_examples::models::{Llama, LlamaConfig};
use sconce_zero::{Engine, EngineOptions, UnitPolicy};

/// The model and the run; by default Llama 3.2 1B's sizes, with a small vocabulary.
#[derive(Debug, Parser)]
struct Arguments {
    #[arg(long, default_value_t = 16)]
    layers: usize,
    #[arg(long, default_value_t = 2048)]
    hidden: usize,
    #[arg(long, default_value_t = 8192)]
    intermediate: usize,
    #[arg(long, default_value_t = 32)]
    heads: usize,
    #[arg(long, default_value_t = 8)]
    key_value_heads: usize,
    #[arg(long, default_value_t = 32_000)]
    vocabulary: usize,
    #[arg(long, default_value_t = 2048)]
    sequence: usize,
    /// Sequences in a step.
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// Steps that are measured, after two that are not.
    #[arg(long, default_value_t = 5)]
    steps: usize,
    /// Shards parameters (of one rank): they are gathered for each layer.
    #[arg(long)]
    shard: bool,
    /// Keeps all activations, instead of computing layers again.
    #[arg(long)]
    keep_activations: bool,
    /// The GPU's dense bf16 operations a second, in 10^12; H100's and H200's by default.
    #[arg(long, default_value_t = 989.0)]
    peak: f64,
    /// Computes on the CPU.
    #[arg(long)]
    cpu: bool,
}

fn main() -> Result<()> {
    // Cargo's own word to bench programs.
    let arguments = Arguments::parse_from(std::env::args_os().filter(|word| word != "--bench"));
    let request = if arguments.cpu {
        DeviceRequest::Cpu
    } else {
        DeviceRequest::Gpu(0)
    };
    let device = match request.open(&World::single()) {
        Ok(device) => device,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };
    let config = LlamaConfig {
        vocab_size: arguments.vocabulary,
        hidden_size: arguments.hidden,
        intermediate_size: arguments.intermediate,
        num_hidden_layers: arguments.layers,
        num_attention_heads: arguments.heads,
        num_key_value_heads: arguments.key_value_heads,
        head_dim: arguments.hidden / arguments.heads,
        max_position_embeddings: arguments.sequence,
        rms_norm_eps: 1e-5,
        rope_theta: 500_000.0,
        ..LlamaConfig::default()
    };
    let strategy: Box<dyn ShardingStrategy> = if arguments.shard {
        Box::new(ZeroStage::Three {
            persistence_threshold: 0,
        })
    } else {
        Box::new(DataParallel)
    };
    let recompute = if arguments.keep_activations {
        UnitPolicy::none()
    } else {
        UnitPolicy::matching(|part| part.class == "LlamaDecoderLayer")
    };
    let options = EngineOptions {
        strategy,
        recompute,
        ..EngineOptions::default()
    };
    let engine = Engine::new(single(), options)?;
    let vb = engine.var_builder(Weights::Random { seed: 1 }, DType::BF16, &device)?;
    let model = Llama::new(&config, vb)?;
    engine.set_optimizer(Box::new(AdamW::default()))?;
    let parameters: usize = engine.parameters().iter().map(|parameter| parameter.elements()).sum();
    let tokens = tokens(&arguments, &device)?;
    let mut seconds = Vec::new();
    for step in 0..arguments.steps + 2 {
        device.synchronize()?;
        let begin = Instant::now();
        let loss = model.loss(&tokens, &tokens)?;
        engine.backward(&loss, true)?;
        let backward = begin.elapsed().as_secs_f64();
        engine.clip_grad_norm(1.0)?;
        engine.step(1e-4)?;
        engine.zero_grad();
        device.synchronize()?;
        let taken = begin.elapsed().as_secs_f64();
        let loss = loss.to_dtype(DType::F32)?.to_scalar::<f32>()?;
        println!(
            "{}",
            serde_json::json!({"step": step, "seconds": taken, "until_gradients": backward, "loss": loss})
        );
        if step >= 2 {
            seconds.push(taken);
        }
    }
    seconds.sort_by(f64::total_cmp);
    let median = seconds.get(seconds.len() / 2).copied().unwrap_or(f64::NAN);
    let per_step = (arguments.batch * arguments.sequence) as f64;
    let memory = engine.memory();
    println!(
        "{}",
        serde_json::json!({
            "parameters": parameters,
            "tokens_per_second": per_step / median,
            "share_of_peak": operations(&arguments, parameters) / median / (arguments.peak * 1e12),
            "shard": arguments.shard,
            "keep_activations": arguments.keep_activations,
            "gathered_peak_bytes": memory.gathered_peak,
            "host_buffer_bytes": memory.buffers,
        })
    );
    Ok(())
}

/// Token ids that are spread over the vocabulary and follow from nothing but their place.
fn tokens(arguments: &Arguments, device: &Device) -> Result<Tensor> {
    let ids = (0..arguments.batch * arguments.sequence).map(|place| (place * 7919 % arguments.vocabulary) as i64);
    Ok(Tensor::from_vec(
        ids.collect(),
        (arguments.batch, arguments.sequence),
        device,
    )?)
}

/// Operations of one step that the model needs.
fn operations(arguments: &Arguments, parameters: usize) -> f64 {
    let embedding = arguments.vocabulary * arguments.hidden;
    let tokens = (arguments.batch * arguments.sequence) as f64;
    let pairs = (arguments.sequence + 1) as f64 / 2.0;
    let of_matrices = 6.0 * (parameters - embedding) as f64;
    // Two products, forward and twice backward, two operations each, of every position with half of the others.
    let of_attention = 12.0 * (arguments.layers * arguments.hidden) as f64 * pairs;
    tokens * (of_matrices + of_attention)
}
