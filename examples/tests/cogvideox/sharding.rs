//! Training on one, two and four ranks under every strategy. Worlds are threads.

use super::worlds::on_ranks;
use super::{VARIANTS, Variant};
use candle_core::{DType, Device, Tensor};
use sconce_collectives::{Communicator, ReduceOp};
use sconce_core::{AdamW, FsdpStrategy, FullyShardedOptions, UnitPolicy, WeightFiles, Weights, WrapPolicy, ZeroStage};
use sconce_examples::models::CogVideoXTransformer;
use sconce_zero::{DataParallel, Engine, EngineOptions};
use std::sync::Arc;

const STEPS: usize = 3;
/// Samples of one step where worlds are compared.
const SAMPLES: usize = 4;

/// What a run is compared by.
#[derive(Debug, PartialEq)]
struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<f32>,
}

/// Trains on the recorded inputs, `world * accumulation` samples a step, each sample of a step with another time step and turned round otherwise.
fn train(variant: &Variant, world: usize, accumulation: usize, options: &(dyn Fn() -> EngineOptions + Sync)) -> Run {
    let rank = |communicator: Arc<dyn Communicator>| {
        let options = EngineOptions {
            frozen: CogVideoXTransformer::constants(),
            first_bucket_bytes: 1 << 14,
            bucket_bytes: 1 << 16,
            ..options()
        };
        let engine = Engine::new(communicator.clone(), options).unwrap();
        let weights = Weights::Files(WeightFiles::open(&variant.folder.weights).unwrap());
        let vb = engine.var_builder(weights, DType::F32, &Device::Cpu).unwrap();
        let model = CogVideoXTransformer::new(&variant.config, None, vb).unwrap();
        engine.set_optimizer(Box::new(AdamW::default())).unwrap();
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            let mut mean = [0f64];
            for micro in 0..accumulation {
                let sample = micro * world + communicator.rank();
                let scale = 1.0 + 0.25 * (step * world * accumulation + sample) as f64;
                let input = |key: &str| (&variant.io[key].narrow(0, 0, 1).unwrap() * scale).unwrap();
                let (latents, text) = (input("hidden_states"), input("encoder_hidden_states"));
                let timestep = Tensor::new(&[(997 * (step + 1) * (sample + 1)) as i64 % 1000], &Device::Cpu).unwrap();
                let ofs = variant.config.ofs_embed_dim.map(|_| 2.0);
                let input = super::VideoInput {
                    latents: &latents,
                    text: &text,
                    timestep: &timestep,
                    ofs,
                };
                let output = model.forward(input).unwrap();
                let target = variant.io["target"].narrow(0, 0, 1).unwrap();
                let loss = (output - target).unwrap().sqr().unwrap().mean_all().unwrap();
                let loss = (loss / accumulation as f64).unwrap();
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
            weights.extend(tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        }
        Run { losses, norms, weights }
    };
    let runs = on_ranks(world, rank);
    assert!(runs.iter().all(|run| *run == runs[0]), "replicas are equal");
    runs.into_iter().next().unwrap()
}

fn stage(stage: ZeroStage) -> EngineOptions {
    EngineOptions {
        strategy: Box::new(stage),
        ..EngineOptions::default()
    }
}

fn fully_sharded(strategy: FsdpStrategy, shard_group: Option<usize>, world: usize) -> EngineOptions {
    let options = FullyShardedOptions {
        sharding_strategy: Some(strategy),
        shard_group,
        auto_wrap_policy: Some(WrapPolicy::transformer_based(["CogVideoXBlock"])),
        ..FullyShardedOptions::default()
    };
    let run = options.resolve().unwrap();
    run.engine_options(EngineOptions::default(), world, world).unwrap()
}

#[test]
fn every_strategy_has_the_bits_of_data_parallelism_and_blocks_computed_again_do_too() {
    for name in VARIANTS {
        let variant = Variant::open(name);
        for world in [1, 2, 4] {
            let parallel = train(&variant, world, 1, &EngineOptions::default);
            assert!(parallel.losses[STEPS - 1].is_finite());
            let three = ZeroStage::Three {
                persistence_threshold: 0,
            };
            let again = || EngineOptions {
                strategy: Box::new(DataParallel),
                recompute: UnitPolicy::all(),
                ..EngineOptions::default()
            };
            let strategies: [(&str, &(dyn Fn() -> EngineOptions + Sync)); 7] = [
                ("ZeRO 1", &|| stage(ZeroStage::One)),
                ("ZeRO 2", &|| stage(ZeroStage::Two)),
                ("ZeRO 3", &|| stage(three)),
                ("ZeRO 3, computed again", &|| EngineOptions {
                    recompute: UnitPolicy::all(),
                    ..stage(three)
                }),
                ("computed again", &again),
                ("FULL_SHARD", &|| fully_sharded(FsdpStrategy::FullShard, None, world)),
                ("SHARD_GRAD_OP", &|| {
                    fully_sharded(FsdpStrategy::ShardGradOp, None, world)
                }),
            ];
            for (strategy, options) in strategies {
                let found = train(&variant, world, 1, options);
                assert!(found == parallel, "{name}, {strategy}, {world} ranks");
            }
        }
    }
}

#[test]
fn worlds_and_groups_that_are_replicas_train_as_one_rank_does() {
    for name in VARIANTS {
        let variant = Variant::open(name);
        let expected = train(&variant, 1, SAMPLES, &EngineOptions::default);
        let check = |found: &Run, what: &str| {
            for (found, expected) in found.losses.iter().zip(&expected.losses) {
                assert!(
                    (found / expected - 1.0).abs() < 2e-6,
                    "{what}: loss {found}, expected {expected}"
                );
            }
            for (found, expected) in found.norms.iter().zip(&expected.norms) {
                assert!(
                    (found / expected - 1.0).abs() < 2e-5,
                    "{what}: norm {found}, expected {expected}"
                );
            }
            // Adam's first steps follow the sign of a gradient, also where it is all rounding.
            let differs = |(a, b): &(&f32, &f32)| (*a - *b).abs() > 1e-5;
            let count = found.weights.iter().zip(&expected.weights).filter(differs).count();
            assert!(count * 500 < found.weights.len(), "{what}: {count} weights differ");
        };
        for world in [2, 4] {
            check(
                &train(&variant, world, SAMPLES / world, &EngineOptions::default),
                &format!("{name}, {world} ranks"),
            );
        }
        for (world, group) in [(2, 1), (4, 2)] {
            for strategy in [FsdpStrategy::HybridShard, FsdpStrategy::HybridShardZero2] {
                let found = train(&variant, world, SAMPLES / world, &|| {
                    fully_sharded(strategy, Some(group), world)
                });
                check(
                    &found,
                    &format!("{name}, {strategy:?}, {world} ranks in groups of {group}"),
                );
            }
        }
    }
}
