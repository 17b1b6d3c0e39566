//! Training through the engine, compared with plain candle variables, PyTorch traces and closed forms.
//!
//! Worlds are threads over shared memory; a test's rule is a function of one rank.
//!
//! What sharded training must keep true, and where it is tested:
//!
//! | invariant | tests |
//! | --- | --- |
//! | the bits of data parallelism, and of plain variables on one rank, whatever is sharded | `oracle`, `zero_stages`, `precision`; models cut into units: `units`, `frozen`, `interleaving`; computed again: `recomputing`; in groups that are replicas: `replicas` |
//! | ranks hold the same bits after every step | `oracle`, `zero_stages`, `agreement`; `scopes` after edits |
//! | padding and fresh memory have no part in anything | `padding`, `shard` |
//! | norms are those of the whole gradient, over every element once | `clipping`, `zero_stages`, `padding` |
//! | micro-batches add up to one batch; what is reduced when | `accumulation`, `zero_stages`, `interleaving` |
//! | all ranks run one schedule of operations, or get an error soon | `agreement`, `unit_misuse` |
//! | operations, elements moved and bytes held are the formula's | `events`, `zero_stages`, `gathering`, `strategy_memory`; the process's memory: `sharded_memory` |
//! | gathers run ahead by a trace, when the mode says, within limits; nothing stays after a step | `events`, `gathering`, `interleaving`, `trace` |
//! | delays of any rank change nothing | `events` |
//! | parameters that the engine can only copy come to the same bits; using a released one is an error | `emulated_device`, `units`, `frozen`, `interleaving` |
//! | what any strategy saved on any world, any other restores, bit for bit | `saving`; what compression keeps: `power_sgd_saving` |
//! | ranks with fewer inputs than others end together, with the mean of those that have some | `uneven` |

mod accumulation;
mod agreement;
mod anomalies;
mod candle_optimizers;
mod clipping;
mod depth;
mod disk;
mod emulated_device;
mod events;
mod frozen;
mod gathering;
mod interleaving;
mod loss_scale;
mod loss_scaling;
mod memory_forecast;
mod misuse;
mod offload;
mod optimizer_precision;
mod optimizers;
mod oracle;
mod padding;
mod parameter_groups;
mod parity;
mod power_sgd;
mod power_sgd_saving;
mod precision;
mod recomputing;
mod replicas;
mod saving;
mod scopes;
mod skipped_steps;
mod stack;
mod strategy_memory;
mod uneven;
mod unit_misuse;
mod units;
mod unused;
mod watched;
mod weight_files;
mod zero_stages;

use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use sconce_collectives::{Communicator, Options, shm};
use sconce_zero::{Engine, EngineOptions, OptimizerRule, Sgd, Weights};
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

/// Options with buckets closed at these sizes in bytes.
fn buckets(first: usize, others: usize) -> EngineOptions {
    EngineOptions {
        first_bucket_bytes: first,
        bucket_bytes: others,
        ..EngineOptions::default()
    }
}

fn engine(communicator: &Arc<dyn Communicator>, options: EngineOptions) -> Engine {
    Engine::new(Arc::clone(communicator), options).unwrap()
}

/// Plain gradient descent with a rate of 1 in [`Engine::step`].
fn sgd() -> Box<dyn OptimizerRule> {
    Box::new(Sgd::default())
}

/// Makes parameters of these names and sizes, one dimension each, with values drawn from their names.
fn parameters<const N: usize>(engine: &Engine, names: [(&str, usize); N]) -> [Tensor; N] {
    let vb = engine
        .var_builder(Weights::Random { seed: 11 }, DType::F32, &Device::Cpu)
        .unwrap();
    names.map(|(name, size)| {
        vb.get_with_hints(size, name, Init::Randn { mean: 0.0, stdev: 1.0 })
            .unwrap()
    })
}

/// Returns the sum of products: a loss whose gradient for `parameter` is exactly `gradient`.
fn linear_loss(parameter: &Tensor, gradient: &[f32]) -> Tensor {
    let gradient = Tensor::from_slice(gradient, parameter.shape(), &Device::Cpu).unwrap();
    (parameter * gradient).unwrap().sum_all().unwrap()
}

fn add(a: Tensor, b: &Tensor) -> Tensor {
    (a + b).unwrap()
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// All current values, in order of name.
fn values(engine: &Engine) -> Vec<f32> {
    let tensors = engine.tensors(true).unwrap();
    tensors.iter().flat_map(|(_, tensor)| flat(tensor)).collect()
}

/// A gradient of `size` numbers that depends on `seed`, of magnitudes over four decades.
fn gradient(size: usize, seed: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 37 + seed * 101 + 13) as f32).sin() * 10f32.powi((i + seed) as i32 % 4 - 2);
    (0..size).map(value).collect()
}

/// Returns the element-wise mean, in f64.
fn mean(all: &[Vec<f32>]) -> Vec<f64> {
    let sum = |i: usize| all.iter().map(|one| f64::from(one[i])).sum::<f64>();
    (0..all[0].len()).map(|i| sum(i) / all.len() as f64).collect()
}

/// Returns the largest `|found - expected| / (1 + |expected|)`.
fn deviation(found: &[f32], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let pairs = found.iter().zip(expected);
    pairs
        .map(|(f, e)| (f64::from(*f) - e).abs() / (1.0 + e.abs()))
        .fold(0.0, f64::max)
}
