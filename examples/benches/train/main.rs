//! Whole training steps: what the managed path costs beside plain candle, what strategies cost beside each other, and how fast
//! all of it is beside PyTorch.
//!
//! Prints JSON lines.

mod overhead;
mod peers;
mod strategies;

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;

/// Measures whole training steps.
#[derive(Debug, Parser)]
struct Arguments {
    /// Compare FSDP's strategies with data parallelism on two ranks, rather than world 1 with plain candle.
    #[arg(long)]
    strategies: bool,
    /// Compare with PyTorch, and two ranks with one.
    #[arg(long)]
    peers: bool,
    /// With --peers: the interpreter that has torch and transformers; without them, ours runs alone.
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// Be a process of --peers.
    #[arg(long, hide = true)]
    stepper: Option<String>,
    /// Pairs of a plain and a managed step.
    #[arg(long, default_value_t = 21)]
    pairs: usize,
    /// Rounds of a step of every strategy, with --strategies and --peers.
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Tokens in each rank's row, with --strategies.
    #[arg(long, default_value_t = 128)]
    sequence: usize,
}

fn main() -> Result<()> {
    // Cargo's own word to bench programs.
    let words = std::env::args_os().filter(|word| word != "--bench");
    let arguments = Arguments::parse_from(words);
    if let Some(strategy) = &arguments.stepper {
        peers::step_on_demand(strategy)
    } else if arguments.peers {
        peers::run(arguments.rounds.max(1), &arguments.python)
    } else if arguments.strategies {
        strategies::run(arguments.rounds.max(1), arguments.sequence)
    } else {
        overhead::run(arguments.pairs.max(1))
    }
}

fn round(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}
