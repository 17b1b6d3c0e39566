//! The accelerator over worlds of threads, its loader, schedules and settings.

mod accumulating;
mod adapters;
mod checkpoint_folders;
mod checkpoints;
mod collating;
mod configuration;
mod configured;
mod deepspeed;
mod files;
mod fp8;
mod fully_sharded;
mod fully_sharded_training;
mod golden;
mod joining;
mod learning_rates;
mod loading;
mod local_sgd;
mod loop_settings;
mod memory_estimate;
mod metrics;
#[cfg(feature = "parquet")]
mod parquet_files;
mod prefetching;
mod processes;
mod random;
mod resuming;
mod run_settings;
mod sampling;
mod schedules;
mod self_test;
mod settings;
mod several_models;
mod skipping;
mod tensors;
mod trackers;
mod training;
mod weighted;

use candle_core::Tensor;
use sconce_collectives::{Communicator, Options, shm};
use sconce_core::{Accelerator, AcceleratorBuilder};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Runs `work` on every rank of a world of threads; returns the results in rank order.
fn on_ranks<R: Send>(size: usize, work: impl Fn(Arc<dyn Communicator>) -> R + Sync) -> Vec<R> {
    let options = Options {
        timeout: Duration::from_secs(60),
        ..Options::default()
    };
    let ranks = shm::threads(size, &options).expect("threads can be made");
    std::thread::scope(|scope| {
        let ranks: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| work(rank))).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("the rank does not panic"))
            .collect()
    })
}

/// Builds an accelerator with an empty environment.
fn build(builder: AcceleratorBuilder) -> Box<dyn Accelerator> {
    builder.build_with(|_| None).expect("the settings are sound")
}

/// Makes a default accelerator of this group.
fn accelerator(communicator: Arc<dyn Communicator>) -> Box<dyn Accelerator> {
    build(AcceleratorBuilder::default().communicator(communicator))
}

fn fixture(file: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(file);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns the largest `|found - expected| / (1 + |expected|)`.
fn deviation(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let pairs = found.iter().zip(expected);
    pairs
        .map(|(f, e)| (f64::from(*f) - e).abs() / (1.0 + e.abs()))
        .fold(0.0, f64::max)
}
