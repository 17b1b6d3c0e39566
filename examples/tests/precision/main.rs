//! Tiny Llama in every precision: what narrow numbers change of training, and what sharding must not change of that.
//!
//! Worlds are threads. All runs take the fixture's rows in turn, two on either of two ranks in each step.

mod autocast;
mod following;
mod kept_in_f32;
#[path = "../worlds/mod.rs"]
mod worlds;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, safetensors};
use sconce_collectives::{Communicator, ReduceOp};
use sconce_core::schedule::ConstantWithWarmup;
use sconce_core::{Accelerator, AcceleratorBuilder, AdamW, Scheduler, WeightFiles, Weights};
use sconce_examples::huggingface::ModelFolder;
use sconce_examples::models::{Llama, LlamaConfig};
use worlds::on_ranks;

/// What a run is compared by.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Run {
    pub(crate) losses: Vec<f64>,
    pub(crate) norms: Vec<f64>,
    /// Losses, norms, skipped steps and all weights after [`SHORT`] steps, as bits.
    pub(crate) early: Vec<u64>,
    pub(crate) skipped: u64,
    pub(crate) loss_scale: f64,
}

/// Steps of a run that shows equality only.
pub(crate) const SHORT: usize = 40;
/// Steps after which all rows have been seen.
pub(crate) const EPOCH: usize = 40;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama")
}

/// The model of the fixtures, made by an accelerator.
pub(crate) fn model(acc: &dyn Accelerator) -> Llama {
    let folder = ModelFolder::open(&fixtures().join("model")).unwrap();
    let config = LlamaConfig::from_model_folder(&folder).unwrap();
    let weights = Weights::Files(WeightFiles::open(&folder.weights).unwrap());
    Llama::new(&config, acc.var_builder(weights).unwrap()).unwrap()
}

/// The fixtures' tokens, [160 rows, 32].
pub(crate) fn tokens() -> Tensor {
    let batches = safetensors::load(fixtures().join("batches.safetensors"), &Device::Cpu).unwrap();
    batches["tokens"].flatten_to(1).unwrap()
}

pub(crate) fn build(builder: AcceleratorBuilder, communicator: Arc<dyn Communicator>) -> Box<dyn Accelerator> {
    builder.communicator(communicator).build_with(|_| None).unwrap()
}

/// Trains on two ranks, which must agree.
pub(crate) fn train(steps: usize, builder: &(dyn Fn() -> AcceleratorBuilder + Sync)) -> Run {
    let tokens = tokens();
    let runs = on_ranks(2, |communicator| {
        let acc = build(builder(), communicator);
        let model = model(&*acc);
        let rule = AdamW {
            learning_rate: 1e-3,
            weight_decay: 0.01,
            ..AdamW::default()
        };
        let mut optimizer = acc.prepare_optimizer(Box::new(rule)).unwrap();
        let mut scheduler = Scheduler::new(ConstantWithWarmup { warmup_steps: 5 }, &optimizer);
        let (mut losses, mut norms, mut early) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..steps {
            let first = 4 * (step % EPOCH) + 2 * acc.world().rank;
            let rows = tokens.narrow(0, first, 2).unwrap();
            let loss = acc.autocast(|| model.loss(&rows, &rows)).unwrap();
            acc.backward(&loss).unwrap();
            norms.extend(acc.clip_grad_norm(1.0).unwrap());
            optimizer.step().unwrap();
            scheduler.step().unwrap();
            optimizer.zero_grad().unwrap();
            let mut mean = [f64::from(
                loss.to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap(),
            )];
            acc.communicator().all_reduce(&mut mean, ReduceOp::Mean).unwrap();
            losses.push(mean[0]);
            if step + 1 == SHORT {
                // Overflow may show as infinity or as NaN.
                let finite = |value: &f64| if value.is_finite() { value.to_bits() } else { 0 };
                early.extend(losses.iter().chain(&norms).map(finite));
                early.push(optimizer.skipped_steps());
                for (_, tensor) in acc.engine().tensors(true).unwrap() {
                    let wide = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
                    let bits = wide.to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits);
                    early.extend(bits.map(u64::from));
                }
            }
        }
        Run {
            losses,
            norms,
            early,
            skipped: optimizer.skipped_steps(),
            loss_scale: optimizer.loss_scale(),
        }
    });
    // As bits: norms of steps that are skipped are no numbers.
    assert!(
        runs.iter().all(|run| format!("{run:?}") == format!("{:?}", runs[0])),
        "replicas are equal"
    );
    runs.into_iter().next().unwrap()
}
