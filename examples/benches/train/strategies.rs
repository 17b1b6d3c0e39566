//! What FSDP's strategies cost in time: their steps and those of data parallelism take turns.
//!
//! Two ranks, processes with one compute thread each, train a Llama of 100 M parameters (hidden 768, 12 layers, 12 heads,
//! vocabulary 10 000) on one row each. A round is one step of every strategy, in an order that turns from round to round.
//! `of_data_parallel` and `overlap_on_of_off` are medians of the rounds' ratios; `gathers_ahead` is one unit ahead of
//! forwards and backwards (`BACKWARD_PRE`), or none. All four models are there at once: about 10 GB.

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use candle_core::{Device, Tensor};
use sconce_collectives::measure::median;
use sconce_collectives::store::{Secret, StoreServer};
use sconce_collectives::{Communicator, Options, connect, environment as variable};
use sconce_core::schedule::ConstantSchedule;
use sconce_core::{
    Accelerator, AcceleratorBuilder, AdamW, BackwardPrefetch, DataLoader, FsdpStrategy, FullyShardedOptions, Optimizer,
    PreparedLoader, TensorDataset, Weights, World, WrapPolicy,
};
use sconce_examples::models::{Llama, LlamaConfig};
use serde_json::json;

use super::round;

const RANKS: usize = 2;

/// Strategies with their names, and whether they gather ahead; the first is what others are compared with.
const CASES: [(&str, FsdpStrategy, bool); 4] = [
    ("NO_SHARD", FsdpStrategy::NoShard, false),
    ("FULL_SHARD", FsdpStrategy::FullShard, true),
    ("FULL_SHARD", FsdpStrategy::FullShard, false),
    ("SHARD_GRAD_OP", FsdpStrategy::ShardGradOp, true),
];
/// Places of FULL_SHARD with and without gathers ahead.
const OVERLAP_ON_OFF: (usize, usize) = (1, 2);

/// Measures over as many rounds, on rows of `sequence` tokens.
pub(crate) fn run(rounds: usize, sequence: usize) -> Result<()> {
    let world = World::from_env()?;
    if world.size == 1 {
        return start_ranks();
    }
    let connection = connect(&world, &Options::default())?;
    let group = &connection.communicator;
    let before = load_average();
    let mut runs = CASES
        .iter()
        .map(|(_, strategy, gathers_ahead)| Run::new(*strategy, *gathers_ahead, group, sequence))
        .collect::<Result<Vec<_>>>()?;
    // By round; the first two make ranks know the order of units, and touch all memory.
    let mut times: Vec<[f64; CASES.len()]> = Vec::new();
    for number in 0..rounds + 2 {
        let mut took = [0.0; CASES.len()];
        for turn in 0..CASES.len() {
            let case = (number + turn) % CASES.len();
            group.barrier()?;
            let start = Instant::now();
            runs[case].step()?;
            group.barrier()?;
            took[case] = start.elapsed().as_secs_f64();
        }
        times.extend((number >= 2).then_some(took));
    }
    if !world.is_main() {
        return Ok(());
    }
    let ratio = |of: usize, to: usize| round(median(times.iter().map(|took| took[of] / took[to]).collect()));
    for (number, ((name, _, gathers_ahead), run)) in CASES.iter().zip(&runs).enumerate() {
        let line = json!({
            "strategy": name,
            "gathers_ahead": gathers_ahead,
            "step_ms": round(median(times.iter().map(|took| took[number] * 1e3).collect())),
            "of_data_parallel": ratio(number, 0),
            "gathered_peak_mib": run.acc.memory().gathered_peak >> 20,
        });
        println!("{line}");
    }
    let line = json!({
        "overlap_on_of_off": ratio(OVERLAP_ON_OFF.0, OVERLAP_ON_OFF.1),
        "ranks": RANKS,
        "sequence": sequence,
        "rounds": rounds,
        "load_average_before": before,
        "load_average_after": load_average(),
    });
    println!("{line}");
    Ok(())
}

/// Starts this program again once for every rank, and waits for all.
fn start_ranks() -> Result<()> {
    let secret = Secret::random();
    let store = StoreServer::start("127.0.0.1:0", secret.clone())?;
    let start = |rank: usize| {
        Command::new(std::env::current_exe()?)
            .args(std::env::args_os().skip(1))
            .env(variable::RANK, rank.to_string())
            .env(variable::LOCAL_RANK, rank.to_string())
            .env(variable::WORLD_SIZE, RANKS.to_string())
            .env(variable::LOCAL_WORLD_SIZE, RANKS.to_string())
            .env(variable::SCONCE_STORE_ADDR, store.address().to_string())
            .env(variable::SCONCE_STORE_SECRET, secret.to_text())
            .env("RAYON_NUM_THREADS", "1")
            .spawn()
    };
    let ranks = (0..RANKS).map(start).collect::<std::io::Result<Vec<_>>>()?;
    for (number, mut rank) in ranks.into_iter().enumerate() {
        let status = rank.wait()?;
        if !status.success() {
            bail!("rank {number}: {status}");
        }
    }
    Ok(())
}

/// A model that trains by one strategy.
struct Run {
    acc: Box<dyn Accelerator>,
    model: Llama,
    optimizer: Optimizer,
    /// One batch.
    loader: PreparedLoader<TensorDataset>,
}

impl Run {
    fn new(
        strategy: FsdpStrategy,
        gathers_ahead: bool,
        group: &Arc<dyn Communicator>,
        sequence: usize,
    ) -> Result<Self> {
        let options = FullyShardedOptions {
            sharding_strategy: Some(strategy),
            auto_wrap_policy: Some(WrapPolicy::transformer_based([])),
            forward_prefetch: Some(gathers_ahead),
            backward_prefetch: gathers_ahead.then_some(BackwardPrefetch::Pre),
            ..FullyShardedOptions::default()
        };
        let acc = AcceleratorBuilder::default()
            .communicator(Arc::clone(group))
            .fully_sharded(options)
            .build()?;
        let config = config(sequence);
        let model = Llama::new(&config, acc.var_builder(Weights::Random { seed: 1 })?)?;
        let tokens: Vec<u32> = (0..RANKS * sequence)
            .map(|at| (at * 7919 % config.vocab_size) as u32)
            .collect();
        let data = TensorDataset::new(vec![Tensor::from_vec(tokens, (RANKS, sequence), &Device::Cpu)?])?;
        let (optimizer, loader, _) = acc.prepare(AdamW::default(), DataLoader::new(data, 1), ConstantSchedule)?;
        Ok(Self {
            acc,
            model,
            optimizer,
            loader,
        })
    }

    fn step(&mut self) -> Result<()> {
        for batch in &mut self.loader {
            let tokens = &batch?[0];
            self.acc.backward(&self.model.loss(tokens, tokens)?)?;
            self.optimizer.step()?;
            self.optimizer.zero_grad()?;
        }
        Ok(())
    }
}

fn config(sequence: usize) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 10_000,
        hidden_size: 768,
        intermediate_size: 2048,
        num_hidden_layers: 12,
        num_attention_heads: 12,
        num_key_value_heads: 12,
        head_dim: 64,
        max_position_embeddings: sequence,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        ..LlamaConfig::default()
    }
}

/// Returns how many processes wanted a core, over the last 1, 5 and 15 minutes.
fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}
