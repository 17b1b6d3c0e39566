//! Every ZeRO stage, with and without accumulation, in f32 and bf16.

use super::{check_against_one_rank, train};
use candle_core::DType;
use sconce_core::{DataParallel, ParameterSet, ShardingStrategy, ZeroStage};
use sconce_zero::EngineOptions;

/// All stages; those of sharded parameters with none, some and all of the model's tensors whole.
fn strategies() -> Vec<Box<dyn ShardingStrategy>> {
    let three = |persistence_threshold| Box::new(ZeroStage::Three { persistence_threshold });
    vec![
        Box::new(DataParallel),
        Box::new(ZeroStage::One),
        Box::new(ZeroStage::Two),
        three(0),
        three(64 * 64),
        three(1 << 20),
    ]
}

fn check(dtype: DType) {
    for world in 1..=4 {
        for accumulation in [1, 4] {
            let stage = |number: usize| EngineOptions {
                strategy: strategies().swap_remove(number),
                ..EngineOptions::default()
            };
            let one_rank = train(1, world * accumulation, dtype, &|| stage(0));
            let mut runs = (0..strategies().len()).map(|number| train(world, accumulation, dtype, &|| stage(number)));
            let parallel = runs.next().unwrap();
            check_against_one_rank(
                &parallel,
                &one_rank,
                dtype,
                &format!("world {world}, accumulation {accumulation}"),
            );
            let mut sharded_gradients = None;
            for (number, run) in runs.enumerate() {
                let what = format!("strategy {}, world {world}, accumulation {accumulation}", number + 1);
                // Where gradients are sharded, means of micro-batches are summed, elsewhere sums are averaged.
                let is_stage_one = number == 0;
                if is_stage_one || accumulation == 1 || world == 1 {
                    assert!(run == parallel, "{what}");
                } else {
                    check_against_one_rank(&run, &one_rank, dtype, &what);
                    assert!(*sharded_gradients.get_or_insert_with(|| run.clone()) == run, "{what}");
                }
            }
        }
    }
}

#[test]
fn every_stage_on_every_world_follows_one_rank_in_f32() {
    check(DType::F32);
}

#[test]
fn every_stage_on_every_world_follows_one_rank_in_bf16_with_f32_masters() {
    check(DType::BF16);
}

#[test]
fn every_stage_on_every_world_trains_around_frozen_weights_alike() {
    for world in 1..=3 {
        let all_but_values = |number: usize| EngineOptions {
            strategy: strategies().swap_remove(number),
            frozen: ParameterSet::matching(|parameter| {
                parameter.name.contains("_proj") && !parameter.name.contains("v_proj")
            }),
            ..EngineOptions::default()
        };
        let mut runs = (0..strategies().len()).map(|number| train(world, 1, DType::F32, &|| all_but_values(number)));
        let parallel = runs.next().unwrap();
        assert_ne!(parallel, train(world, 1, DType::F32, &EngineOptions::default));
        for (number, run) in runs.enumerate() {
            assert!(run == parallel, "strategy {}, world {world}", number + 1);
        }
    }
}
