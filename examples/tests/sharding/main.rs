//! The shipped Llama trains alike however its state is sharded: under every ZeRO stage and every strategy of FSDP's.
//!
//! Worlds are threads. A step has the same micro-batches whatever the world: `world * accumulation` of one row each.

mod fully_sharded;
mod stages;
#[path = "../worlds/mod.rs"]
mod worlds;

use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use sconce_collectives::{Communicator, ReduceOp};
use sconce_core::{AdamW, WeightFiles, Weights};
use sconce_examples::huggingface::ModelFolder;
use sconce_examples::models::{Llama, LlamaConfig};
use sconce_examples::text::TokenRows;
use sconce_zero::{Engine, EngineOptions};
use worlds::on_ranks;

const STEPS: usize = 4;
const SEQUENCE: usize = 24;

/// What a run is compared by.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<f32>,
}

pub(crate) fn train(
    world: usize,
    accumulation: usize,
    dtype: DType,
    options: &(dyn Fn() -> EngineOptions + Sync),
) -> Run {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
    let folder = ModelFolder::open(&assets.join("tiny-llama")).unwrap();
    let config = LlamaConfig::from_model_folder(&folder).unwrap();
    let text = assets.join("text/lincoln.txt");
    let rows = TokenRows::read(&text, folder.tokenizer.as_deref(), config.vocab_size, Some(SEQUENCE)).unwrap();
    let rank = |communicator: Arc<dyn Communicator>| {
        let options = EngineOptions {
            first_bucket_bytes: 1 << 14,
            bucket_bytes: 1 << 16,
            ..options()
        };
        let engine = Engine::new(communicator.clone(), options).unwrap();
        let weights = Weights::Files(WeightFiles::open(&folder.weights).unwrap());
        let model = Llama::new(&config, engine.var_builder(weights, dtype, &Device::Cpu).unwrap()).unwrap();
        let rule = AdamW {
            weight_decay: 0.1,
            ..AdamW::default()
        };
        engine.set_optimizer(Box::new(rule)).unwrap();
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            let mut mean = [0f64];
            for micro in 0..accumulation {
                let row = (step * accumulation + micro) * world + communicator.rank();
                let tokens = &rows.tokens[row * SEQUENCE..(row + 1) * SEQUENCE];
                let tokens = Tensor::from_slice(tokens, (1, SEQUENCE), &Device::Cpu).unwrap();
                let loss = model.loss(&tokens, &tokens).unwrap();
                let loss = (loss.to_dtype(DType::F32).unwrap() / accumulation as f64).unwrap();
                engine.backward(&loss, micro + 1 == accumulation).unwrap();
                mean[0] += f64::from(loss.to_scalar::<f32>().unwrap());
            }
            norms.push(engine.clip_grad_norm(1.0).unwrap());
            engine.step(1e-3).unwrap();
            engine.zero_grad();
            communicator.all_reduce(&mut mean, ReduceOp::Mean).unwrap();
            losses.push(mean[0]);
        }
        let mut weights = Vec::new();
        for (_, tensor) in engine.tensors(true).unwrap() {
            let wide = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
            weights.extend(wide.to_vec1::<f32>().unwrap());
        }
        Run { losses, norms, weights }
    };
    let runs = on_ranks(world, rank);
    assert!(runs.iter().all(|run| *run == runs[0]), "replicas are equal");
    runs.into_iter().next().unwrap()
}

/// Compares a run with that of one rank on the same micro-batches.
pub(crate) fn check_against_one_rank(found: &Run, expected: &Run, dtype: DType, what: &str) {
    let furthest = |a: &[f64], b: &[f64]| {
        let pairs = a.iter().zip(b);
        pairs.map(|(a, b)| (a / b - 1.0).abs()).fold(0.0, f64::max)
    };
    // Sums over ranks run in another order than sums over micro-batches.
    assert!((found.losses[0] / expected.losses[0] - 1.0).abs() < 1e-6, "{what}");
    // A gradient of a third of the loss is rounded to bf16 otherwise than a third of the loss's gradient.
    let is_rounded_otherwise = dtype == DType::BF16 && what.contains("world 3");
    let first_norm = if is_rounded_otherwise { 2f64.powi(-9) } else { 2e-6 };
    assert!((found.norms[0] / expected.norms[0] - 1.0).abs() < first_norm, "{what}");
    // From the second step on a bf16 weight whose master lies next to the middle of two may have been rounded otherwise.
    let (losses, norms, step) = match dtype {
        DType::F32 => (1e-6, 1e-5, 1e-5),
        _ => (1e-3, 1e-2, 2f32.powi(-7)),
    };
    let (loss, norm) = (
        furthest(&found.losses, &expected.losses),
        furthest(&found.norms, &expected.norms),
    );
    assert!(
        loss < losses && norm < norms,
        "{what}: losses {loss:.1e}, norms {norm:.1e}"
    );
    let differs = |(a, b): &(&f32, &f32)| (*a - *b).abs() > step * (1.0 + b.abs()).min(0.1 + b.abs());
    let count = found.weights.iter().zip(&expected.weights).filter(differs).count();
    // Adam's first steps follow the sign of a gradient, also where it is all rounding.
    let share = count as f64 / found.weights.len() as f64;
    let most = if is_rounded_otherwise { 5e-3 } else { 1e-3 };
    assert!(share < most, "{what}: {count} weights differ by more than {step:e}");
}
