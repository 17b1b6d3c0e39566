//! ZeRO's stages come to the same bits as data parallelism: what is sharded is summed and updated in the same order.

use super::oracle::{ROWS, STEPS, Trace, batch, deviations, new_model};
use super::{bits, buckets, engine, gradient, linear_loss, on_ranks, parameters, values};
use candle_core::Tensor;
use sconce_collectives::{ReduceOp, Traffic};
use sconce_zero::{
    AdamW, DataParallel, EngineOptions, ParameterInfo, Placement, Residence, Sgd, ShardingStrategy, ZeroStage,
};

/// Stage 3 without a parameter that stays whole.
pub(crate) const EVERYTHING: ZeroStage = ZeroStage::Three {
    persistence_threshold: 0,
};
/// Stage 3 with some of the model's parameters whole.
const WEIGHTS: ZeroStage = ZeroStage::Three {
    persistence_threshold: 17,
};
pub(crate) const STAGES: [ZeroStage; 4] = [ZeroStage::One, ZeroStage::Two, EVERYTHING, WEIGHTS];

pub(crate) fn options(strategy: impl ShardingStrategy + 'static) -> EngineOptions {
    with_buckets(strategy, 1 << 20, 25 << 20)
}

fn with_buckets(strategy: impl ShardingStrategy + 'static, first: usize, others: usize) -> EngineOptions {
    EngineOptions {
        strategy: Box::new(strategy),
        ..buckets(first, others)
    }
}

/// Trains with AdamW, clipping in every step; each rank takes its share of the rows, in `accumulation` micro-batches of
/// which only the last synchronises.
pub(crate) fn train(world: usize, accumulation: usize, options: impl Fn() -> EngineOptions + Sync) -> Vec<Trace> {
    on_ranks(world, |communicator| {
        let engine = engine(&communicator, options());
        let model = new_model(&engine);
        let rule = AdamW {
            weight_decay: 0.1,
            ..AdamW::default()
        };
        engine.set_optimizer(Box::new(rule)).unwrap();
        let mut trace = Trace {
            losses: Vec::new(),
            norms: Vec::new(),
            parameters: Vec::new(),
        };
        for step in 0..STEPS {
            let (rows, targets) = batch(step);
            let share = ROWS / world / accumulation;
            let mut mean = [0f32];
            for micro in 0..accumulation {
                let own = |tensor: &Tensor| {
                    let start = (micro * world + communicator.rank()) * share;
                    tensor.narrow(0, start, share).unwrap()
                };
                let loss = (model.loss(&own(&rows), &own(&targets)) / accumulation as f64).unwrap();
                engine.backward(&loss, micro + 1 == accumulation).unwrap();
                mean[0] += loss.to_scalar::<f32>().unwrap();
            }
            let norm = engine.grad_norm().unwrap();
            assert_eq!(engine.clip_grad_norm(0.05).unwrap().to_bits(), norm.to_bits());
            trace.norms.push(norm.to_bits());
            engine.step(1e-2).unwrap();
            engine.zero_grad();
            communicator.all_reduce(&mut mean, ReduceOp::Mean).unwrap();
            trace.losses.push(mean[0].to_bits());
        }
        trace.parameters = bits(&values(&engine));
        trace
    })
}

#[test]
fn stages_give_the_bits_of_data_parallelism_on_every_world_and_bucket_size() {
    for world in 1..=4 {
        for (first, others) in [(1 << 20, 25 << 20), (0, 0), (600, 1000)] {
            let expected = train(world, 1, || with_buckets(DataParallel, first, others));
            for stage in STAGES {
                let found = train(world, 1, || with_buckets(stage, first, others));
                assert_eq!(found, expected, "{stage:?}, world {world}, buckets {first} {others}");
            }
        }
    }
}

#[test]
fn accumulation_gives_the_same_bits_in_stage_one_and_equals_within_rounding_from_stage_two_on() {
    for world in [1, 2, 3] {
        let expected = train(world, 4, || options(DataParallel));
        assert_eq!(train(world, 4, || options(ZeroStage::One)), expected, "world {world}");
        // Stage 2 adds up means of micro-batches where the others take the mean of sums.
        let found = train(world, 4, || options(ZeroStage::Two));
        let [losses, norms, parameters] = deviations(&found[0], &expected[0]);
        assert!(
            losses < 1e-6 && norms < 1e-5 && parameters < 1e-5,
            "{losses} {norms} {parameters}"
        );
        assert!(found.iter().all(|rank| rank.parameters == found[0].parameters));
        assert_eq!(train(world, 4, || options(EVERYTHING)), found, "world {world}");
    }
}

#[test]
fn tensors_smaller_than_the_world_are_sharded_too() {
    let sizes = [("a", 1), ("b", 2), ("c", 3), ("d", 5), ("e", 33)];
    let run = |world, strategy: fn() -> EngineOptions| {
        on_ranks(world, |communicator| {
            let engine = engine(&communicator, strategy());
            let tensors = parameters(&engine, sizes);
            engine.set_optimizer(Box::new(AdamW::default())).unwrap();
            let mut norms = Vec::new();
            for step in 0..3 {
                let losses = tensors.iter().enumerate().map(|(number, tensor)| {
                    let seed = step * 10 + number + communicator.rank();
                    linear_loss(tensor, &gradient(tensor.elem_count(), seed))
                });
                let loss = losses.reduce(|a, b| (a + b).unwrap()).unwrap();
                engine.backward(&loss, true).unwrap();
                norms.push(engine.clip_grad_norm(0.5).unwrap().to_bits());
                engine.step(0.1).unwrap();
                engine.zero_grad();
            }
            (norms, bits(&values(&engine)))
        })
    };
    for world in 1..=4 {
        let expected = run(world, || options(DataParallel));
        assert_eq!(
            run(world, || options(ZeroStage::One)),
            expected,
            "stage 1, world {world}"
        );
        assert_eq!(
            run(world, || options(ZeroStage::Two)),
            expected,
            "stage 2, world {world}"
        );
    }
}

/// A strategy, and over how many ranks it shards gradients and optimizer state.
type Strategy = (fn() -> EngineOptions, [u64; 2]);

#[test]
fn every_stage_moves_two_elements_per_parameter_and_step_and_holds_its_share() {
    const SIZES: [(&str, usize); 4] = [("a", 1003), ("b", 17), ("c", 2048), ("d", 5)];
    const PARAMETERS: u64 = 1003 + 17 + 2048 + 5;
    let run = |world, strategy: fn() -> EngineOptions| {
        on_ranks(world, |communicator| {
            let engine = engine(&communicator, strategy());
            let tensors = parameters(&engine, SIZES);
            engine.set_optimizer(Box::new(AdamW::default())).unwrap();
            let step = || {
                let losses = tensors
                    .iter()
                    .map(|tensor| linear_loss(tensor, &gradient(tensor.elem_count(), 1)));
                engine
                    .backward(&losses.reduce(|a, b| (a + b).unwrap()).unwrap(), true)
                    .unwrap();
                engine.step(0.1).unwrap();
                engine.zero_grad();
            };
            let volume = || communicator.traffic().iter().map(Traffic::volume).sum::<u64>();
            step();
            let before = volume();
            step();
            (volume() - before, engine.memory())
        })
    };
    for world in 2..=4u64 {
        // One bucket: four slots, each rounded up to whole cache lines in every part.
        let padding = 4 * (16 + world) * world;
        let within = |found: u64, shares: u64, of: u64| {
            let least = shares * PARAMETERS / of;
            assert!(
                (least..=least + shares * padding).contains(&found),
                "{found}: {shares}/{of}, world {world}"
            );
        };
        let elements = |bytes: u64| bytes / 4;
        let strategies: [Strategy; 3] = [
            (|| options(DataParallel), [1, 1]),
            (|| options(ZeroStage::One), [1, world]),
            (|| options(ZeroStage::Two), [world, world]),
        ];
        for (strategy, [gradients, state]) in strategies {
            for (volume, memory) in run(world as usize, strategy) {
                within(volume, 2, 1);
                assert_eq!(elements(memory.parameters), PARAMETERS);
                within(elements(memory.gradients), 1, gradients);
                within(elements(memory.optimizer_state), 2, state);
                within(elements(memory.buffers), u64::from(gradients > 1), 1);
            }
        }
    }
}

/// Shards the gradients of some parameters, the optimizer state of some, and nothing of the rest.
#[derive(Debug)]
struct Mixed;

impl ShardingStrategy for Mixed {
    fn name(&self) -> &str {
        "mixed"
    }

    fn place(&self, parameter: &ParameterInfo) -> Placement {
        match parameter.name.as_str() {
            "tied.weight" => ZeroStage::Two.place(parameter),
            name if name.starts_with("up") => ZeroStage::One.place(parameter),
            "down.weight" => EVERYTHING.place(parameter),
            _ => DataParallel.place(parameter),
        }
    }
}

#[test]
fn a_users_mixture_of_placements_gives_the_same_bits() {
    for world in 1..=4 {
        // In buckets of one parameter the norm's parts are summed in the same order whatever the placements are.
        let expected = train(world, 1, || with_buckets(DataParallel, 0, 0));
        assert_eq!(train(world, 1, || with_buckets(Mixed, 0, 0)), expected, "world {world}");
    }
}

#[test]
fn unused_parameters_are_left_alone_or_get_the_mean_with_zeros_in_every_stage() {
    let run = |strategy: fn() -> EngineOptions| {
        on_ranks(3, |communicator| {
            let options = EngineOptions {
                find_unused_parameters: true,
                ..strategy()
            };
            let engine = engine(&communicator, options);
            let [used, partly, unused] = parameters(&engine, [("used", 7), ("partly", 9), ("unused", 4)]);
            engine.set_optimizer(Box::new(Sgd::default())).unwrap();
            let before = bits(&super::flat(&unused));
            for step in 0..2 {
                let mut loss = linear_loss(&used, &gradient(7, step + communicator.rank()));
                if communicator.rank() == 1 {
                    loss = (loss + linear_loss(&partly, &gradient(9, step))).unwrap();
                }
                engine.backward(&loss, true).unwrap();
                engine.step(1.0).unwrap();
                engine.zero_grad();
            }
            assert_eq!(bits(&super::flat(&unused)), before);
            bits(&values(&engine))
        })
    };
    let expected = run(|| options(DataParallel));
    assert!(expected.iter().all(|rank| *rank == expected[0]));
    assert_eq!(run(|| options(ZeroStage::One)), expected);
    assert_eq!(run(|| options(ZeroStage::Two)), expected);
}

#[test]
fn only_stages_keep_state_by_shares() {
    let parameter = ParameterInfo {
        name: "w".into(),
        shape: vec![4],
    };
    let shards = |placement: Placement| {
        [placement.parameter, placement.gradient, placement.optimizer_state].map(|r| r == Residence::Sharded)
    };
    assert_eq!(shards(DataParallel.place(&parameter)), [false, false, false]);
    assert_eq!(shards(ZeroStage::One.place(&parameter)), [false, false, true]);
    assert_eq!(shards(ZeroStage::Two.place(&parameter)), [false, true, true]);
}
