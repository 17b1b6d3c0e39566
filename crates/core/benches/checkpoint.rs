//! Time of saving and loading a checkpoint on two ranks, beside what the disk itself takes for as many bytes.
//!
//! Prints JSON lines. Ranks are threads, and hold half of the state each (ZeRO stage 3). In each round, in turn: `disk_write` writes as many bytes as each rank's file has in
//! pieces of a mebibyte and waits until they are on disk, `save` saves; `disk_read` reads those files, `load` loads. Before
//! each read the files are dropped from the page cache. `memcpy` copies as many bytes in memory, `blocking` is how long a save
//! in the background keeps the training. Medians are over rounds; `of_...` are medians of the ratio within one round.
//!
//! A program of its own, with one rank that computes on one thread, times steps of training (`step`) and, in turn, steps
//! while a checkpoint is written behind them (`step_while_writing`); in a round the writing has to outlast the steps.

use candle_core::{DType, Device};
use candle_nn::Module as _;
use sconce_collectives::measure::median;
use sconce_core::checkpoint::Checkpoints;
use sconce_core::measure::{CheckpointPart, CheckpointTimes};
use sconce_core::nn::linear;
use sconce_core::{AcceleratorBuilder, AdamW, Weights, launch_threads};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

const RANKS: usize = 2;
const LAYERS: usize = 8;
/// Set in the program that times steps.
const STEPS: &str = "SCONCE_BENCH_STEPS";
/// Rows of a step's batch, so that it computes for longer than it touches memory.
const BATCH: usize = 32;

fn main() {
    let mut rest = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let (mut mebibytes, mut rounds) = (1024, 7);
    while let Some(argument) = rest.next() {
        let value = rest.next().unwrap_or_else(|| usage(&argument));
        let number = value.parse::<usize>().unwrap_or_else(|_| usage(&value)).max(1);
        match argument.as_str() {
            "--rounds" => rounds = number,
            "--mebibytes" => mebibytes = number,
            _ => usage(&argument),
        }
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder in the target folder");
    if std::env::var_os(STEPS).is_some() {
        return bench_steps(folder.path(), mebibytes << 20, rounds).expect("no rank fails");
    }
    let times = launch_threads(RANKS, |builder| {
        CheckpointTimes::measure(builder, folder.path(), mebibytes << 20, rounds)
    });
    let times = times.expect("no rank fails").remove(0);
    for part in CheckpointPart::ALL {
        let own = times.seconds(part);
        let mut line = serde_json::json!({
            "what": part.name(),
            "seconds": round(own),
            "gb_per_s": round(times.bytes as f64 / own / 1e9),
        });
        if let (Some(floor), Some(ratio)) = (part.floor(), times.ratio(part)) {
            line[format!("of_{}", floor.name())] = round(ratio).into();
        }
        println!("{line}");
    }
    let mut steps = Command::new(std::env::current_exe().expect("this program has a path"));
    steps.args(["--mebibytes", &mebibytes.to_string(), "--rounds", &rounds.to_string()]);
    let status = steps.env(STEPS, "1").env("RAYON_NUM_THREADS", "1").status();
    assert!(status.expect("this program starts again").success());
}

/// Times steps of one rank with and without a save behind them.
fn bench_steps(folder: &Path, bytes: usize, rounds: usize) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let checkpoints = Checkpoints {
        folder: folder.to_owned(),
        total_limit: Some(1),
    };
    let acc = AcceleratorBuilder::default().checkpoints(checkpoints).build()?;
    let vb = acc.var_builder(Weights::Random { seed: 1 })?;
    let rows = bytes / 3 / 4 / LAYERS / 1024;
    let layers = (0..LAYERS).map(|layer| linear(1024, rows, vb.pp(format!("layer{layer}"))));
    let layers = layers.collect::<candle_core::Result<Vec<_>>>()?;
    acc.prepare_optimizer(Box::new(AdamW::default()))?;
    let input = candle_core::Tensor::randn(0f32, 1.0, (BATCH, 1024), &Device::Cpu)?;
    let step = || -> Result<f64, Box<dyn std::error::Error + Send + Sync>> {
        let start = Instant::now();
        let mut loss = candle_core::Tensor::zeros((), DType::F32, &Device::Cpu)?;
        for layer in &layers {
            loss = (loss + layer.forward(&input)?.sqr()?.mean_all()?)?;
        }
        acc.backward(&loss)?;
        acc.engine().step(1e-3)?;
        acc.engine().zero_grad();
        Ok(start.elapsed().as_secs_f64())
    };
    let (mut alone, mut ratios, mut outlasted) = (Vec::new(), Vec::new(), 0);
    for number in 0..=rounds {
        step()?;
        let own = step()?;
        acc.save_checkpoint_in_background()?;
        let beside = step()?;
        let start = Instant::now();
        acc.finish_saving()?;
        if number > 0 {
            outlasted += usize::from(start.elapsed().as_secs_f64() > 0.01);
            alone.push(own);
            ratios.push(beside / own);
        }
    }
    println!(
        "{}",
        serde_json::json!({
            "what": "step_while_writing",
            "step_seconds": round(median(alone)),
            "of_step": round(median(ratios)),
            "writing_outlasted": format!("{outlasted} of {rounds}"),
        })
    );
    Ok(())
}

fn usage(what: &str) -> ! {
    eprintln!("error: {what:?} was not expected; use --mebibytes 1024 --rounds 7");
    std::process::exit(2)
}

fn round(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}
