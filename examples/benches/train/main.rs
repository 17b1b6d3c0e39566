//! Whole training steps: what the managed path costs beside plain candle, and what strategies cost beside each other.
//!
//! Prints JSON lines.

mod overhead;
mod strategies;

use anyhow::Result;
use clap::Parser;

/// Measures whole training steps.
#[derive(Debug, Parser)]
struct Arguments {
    /// Compare FSDP's strategies with data parallelism on two ranks, rather than world 1 with plain candle.
    #[arg(long)]
    strategies: bool,
    /// Pairs of a plain and a managed step.
    #[arg(long, default_value_t = 21)]
    pairs: usize,
    /// Rounds of a step of every strategy.
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
    if arguments.strategies {
        strategies::run(arguments.rounds.max(1), arguments.sequence)
    } else {
        overhead::run(arguments.pairs.max(1))
    }
}

fn round(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}
