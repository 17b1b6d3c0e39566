//! Ranks that shard in groups, which are replicas of each other.

use super::oracle::{batch, new_model};
use super::zero_stages::{EVERYTHING, STAGES, options};
use super::{bits, deviation, engine, on_ranks, sgd, values};
use sconce_collectives::Kind;
use sconce_zero::{AdamW, DataParallel, EngineOptions, Error, MemoryReport, ParameterSet, ShardingStrategy};

type Strategy = fn() -> Box<dyn ShardingStrategy>;

/// All that keep something by shares, with a mixture among them of what is sharded and what is not.
const STRATEGIES: [Strategy; 3] = [|| Box::new(STAGES[0]), || Box::new(STAGES[1]), || Box::new(EVERYTHING)];

fn in_groups_of(ranks: usize) -> EngineOptions {
    EngineOptions {
        shard_group: Some(ranks),
        ..options(EVERYTHING)
    }
}

/// What a rank comes to: norms, values, and how much it holds.
type Outcome = (Vec<f64>, Vec<f32>, MemoryReport);

/// Trains on `world` ranks; each rank's micro-batches are rows of one batch for each step.
fn train(world: usize, accumulation: usize, strategy: Strategy, shard_group: Option<usize>) -> Vec<Outcome> {
    on_ranks(world, |communicator| {
        let engine = engine(
            &communicator,
            EngineOptions {
                strategy: strategy(),
                shard_group,
                ..options(DataParallel)
            },
        );
        let model = new_model(&engine);
        engine.set_optimizer(Box::new(AdamW::default())).unwrap();
        let mut norms = Vec::new();
        for step in 0..3 {
            let (rows, targets) = batch(step);
            let share = rows.dims()[0] / (world * accumulation);
            for micro in 0..accumulation {
                let start = (micro * world + communicator.rank()) * share;
                let part = |tensor: &candle_core::Tensor| tensor.narrow(0, start, share).unwrap();
                let loss = model.loss(&part(&rows), &part(&targets));
                let loss = (loss / accumulation as f64).unwrap();
                engine.backward(&loss, micro + 1 == accumulation).unwrap();
            }
            norms.push(engine.clip_grad_norm(0.1).unwrap());
            engine.step(0.01).unwrap();
            engine.zero_grad();
        }
        (norms, values(&engine), engine.memory())
    })
}

fn assert_near(found: &[f64], expected: &[f64], what: &str) {
    for (found, expected) in found.iter().zip(expected) {
        assert!((found / expected - 1.0).abs() < 1e-5, "{what}: {found} and {expected}");
    }
}

#[test]
fn groups_train_as_one_group_does_and_every_rank_comes_to_the_same_bits() {
    for (world, group) in [(2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3)] {
        for accumulation in [1, 2] {
            let expected = train(world, accumulation, || Box::new(DataParallel), None).swap_remove(0);
            let wide = Vec::from_iter(expected.1.iter().map(|value| f64::from(*value)));
            for (number, strategy) in STRATEGIES.into_iter().enumerate() {
                let what = format!("strategy {number}, world {world}, groups of {group}, accumulation {accumulation}");
                let ranks = train(world, accumulation, strategy, Some(group));
                for (norms, values, _) in &ranks {
                    assert_eq!(bits(values), bits(&ranks[0].1), "{what}");
                    assert_eq!(norms, &ranks[0].0, "{what}");
                }
                assert_near(&ranks[0].0, &expected.0, &what);
                let found = deviation(&ranks[0].1, &wide);
                assert!(found < 1e-4, "{what}: {found}");
            }
        }
    }
}

#[test]
fn one_group_of_all_ranks_is_no_group() {
    for strategy in STRATEGIES {
        let (found, expected) = (train(3, 2, strategy, Some(3)), train(3, 2, strategy, None));
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!((&found.0, bits(&found.1)), (&expected.0, bits(&expected.1)));
        }
    }
}

#[test]
fn a_rank_holds_its_share_of_its_groups_model() {
    for (world, group) in [(4, 2), (6, 2), (4, 1)] {
        let found = &train(world, 1, STRATEGIES[2], Some(group))[0].2;
        let alone = &train(group, 1, STRATEGIES[2], None)[0].2;
        assert_eq!(found, alone, "{world} ranks in groups of {group}");
    }
}

#[test]
fn shares_are_reduced_in_the_group_every_time_and_between_groups_when_a_backward_synchronises() {
    let counts = on_ranks(4, |communicator| {
        let engine = engine(&communicator, in_groups_of(2));
        let model = new_model(&engine);
        engine.set_optimizer(sgd()).unwrap();
        let calls = |kind: Kind| {
            let traffic = engine.traffic();
            traffic.iter().find(|t| t.kind == kind).map_or(0, |t| t.calls)
        };
        let counted = |synchronise| {
            let before = [calls(Kind::ReduceScatterInPlace), calls(Kind::AllReduce)];
            let (rows, targets) = batch(0);
            engine.backward(&model.loss(&rows, &targets), synchronise).unwrap();
            [
                calls(Kind::ReduceScatterInPlace) - before[0],
                calls(Kind::AllReduce) - before[1],
            ]
        };
        [counted(false), counted(false), counted(true)]
    });
    for [first, second, last] in counts {
        assert!(first[0] > 0);
        assert_eq!((first, second), ([first[0], 0], first));
        // One for each bucket's shares.
        assert_eq!(last, [first[0], first[0]]);
    }
}

#[test]
fn edits_and_reads_reach_every_group() {
    let ranks = on_ranks(4, |communicator| {
        let engine = engine(&communicator, in_groups_of(2));
        new_model(&engine);
        engine.set_optimizer(sgd()).unwrap();
        let edit = engine.edit(&ParameterSet::matching(|_| true), 3, |scope| {
            for name in Vec::from_iter(scope.names()) {
                scope.set(name, &(scope.get(name)? * 2.0)?)?;
            }
            Ok(())
        });
        let before = values(&engine);
        edit.unwrap();
        (before, values(&engine))
    });
    for (before, after) in &ranks {
        assert_eq!(bits(after), bits(&ranks[0].1));
        assert_eq!(before, after);
    }
}

#[test]
fn a_group_that_does_not_divide_the_ranks_is_refused() {
    for group in [0, 2, 5] {
        let errors = on_ranks(3, |communicator| {
            sconce_zero::Engine::new(communicator, in_groups_of(group)).unwrap_err()
        });
        for error in errors {
            assert!(
                matches!(
                    error,
                    Error::Setting {
                        setting: "shard_group",
                        ..
                    }
                ),
                "{error}"
            );
        }
    }
}

#[test]
fn a_rank_that_fails_ends_the_ranks_of_other_groups_too() {
    let errors = on_ranks(4, |communicator| {
        let engine = engine(&communicator, in_groups_of(2));
        let model = new_model(&engine);
        engine.set_optimizer(sgd()).unwrap();
        let (rows, targets) = batch(0);
        let loss = model.loss(&rows, &targets);
        let loss = if communicator.rank() == 3 { rows } else { loss };
        engine.backward(&loss, true).map_err(|error| error.to_string())
    });
    assert!(errors.iter().all(Result::is_err), "{errors:?}");
    assert!(errors[3].as_ref().unwrap_err().contains("shape"), "{errors:?}");
}
