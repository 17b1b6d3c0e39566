//! Every strategy of FSDP's, whatever is gathered ahead and computed again.

use super::{check_against_one_rank, train};
use candle_core::DType;
use sconce_core::{BackwardPrefetch, FsdpStrategy, FullyShardedOptions, WrapPolicy};
use sconce_zero::EngineOptions;

use FsdpStrategy::{FullShard, HybridShard, HybridShardZero2, NoShard, ShardGradOp};

/// Choices of units: the layers alone, everything declared, and what is large enough.
fn policies() -> [WrapPolicy; 3] {
    [
        WrapPolicy::transformer_based(["LlamaDecoderLayer"]),
        WrapPolicy::transformer_based([]),
        WrapPolicy::SizeBased { min_num_params: 20_000 },
    ]
}

/// Nothing ahead, and one unit ahead in one or both passes.
const PREFETCHES: [(BackwardPrefetch, bool); 4] = [
    (BackwardPrefetch::None, false),
    (BackwardPrefetch::Pre, false),
    (BackwardPrefetch::Post, true),
    (BackwardPrefetch::Pre, true),
];

fn engine_options(options: FullyShardedOptions, world: usize) -> EngineOptions {
    let run = options.resolve().unwrap();
    run.engine_options(EngineOptions::default(), world, world).unwrap()
}

/// Returns every choice with which a strategy is tried.
fn choices(strategy: FsdpStrategy, shard_group: Option<usize>) -> Vec<FullyShardedOptions> {
    let mut list = Vec::new();
    for (number, (backward, forward)) in PREFETCHES.into_iter().enumerate() {
        for recompute in [false, true] {
            list.push(FullyShardedOptions {
                sharding_strategy: Some(strategy),
                shard_group,
                auto_wrap_policy: policies().into_iter().nth(number % 3),
                backward_prefetch: Some(backward),
                forward_prefetch: Some(forward),
                activation_checkpointing: Some(recompute),
                ..FullyShardedOptions::default()
            });
        }
    }
    list
}

#[test]
fn every_strategy_has_the_bits_of_data_parallelism() {
    for world in 1..=4 {
        let parallel = train(world, 1, DType::F32, &EngineOptions::default);
        for strategy in [FullShard, ShardGradOp, NoShard] {
            for options in choices(strategy, None) {
                let found = train(world, 1, DType::F32, &|| engine_options(options.clone(), world));
                assert!(found == parallel, "world {world}, {options:?}");
            }
        }
    }
}

#[test]
fn groups_that_are_replicas_train_as_one_rank_does() {
    for (world, group) in [(2, 1), (3, 1), (4, 1), (4, 2)] {
        for accumulation in [1, 2] {
            let expected = train(1, world * accumulation, DType::F32, &EngineOptions::default);
            let mut runs = Vec::new();
            for strategy in [HybridShard, HybridShardZero2] {
                for options in choices(strategy, Some(group)) {
                    let engine_options = || engine_options(options.clone(), world);
                    let found = train(world, accumulation, DType::F32, &engine_options);
                    let what = format!("world {world}, groups of {group}, accumulation {accumulation}, {options:?}");
                    check_against_one_rank(&found, &expected, DType::F32, &what);
                    runs.push((found, what));
                }
            }
            for (found, what) in &runs {
                assert!(*found == runs[0].0, "{what}");
            }
        }
    }
}

#[test]
fn in_bf16_with_f32_masters_it_is_the_same() {
    let parallel = train(2, 1, DType::BF16, &EngineOptions::default);
    for strategy in [FullShard, ShardGradOp, NoShard] {
        for options in choices(strategy, None) {
            let found = train(2, 1, DType::BF16, &|| engine_options(options.clone(), 2));
            assert!(found == parallel, "{options:?}");
        }
    }
}

#[test]
fn gradients_that_are_reduced_once_in_a_window_add_up_as_in_data_parallelism() {
    for world in 1..=3 {
        let parallel = train(world, 3, DType::F32, &EngineOptions::default);
        for strategy in [FullShard, ShardGradOp] {
            for mut options in choices(strategy, None) {
                options.sync_each_batch = Some(false);
                let found = train(world, 3, DType::F32, &|| engine_options(options.clone(), world));
                assert!(found == parallel, "world {world}, {options:?}");
            }
        }
    }
}
