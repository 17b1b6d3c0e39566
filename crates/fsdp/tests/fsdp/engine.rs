//! What the engine is told.

use sconce_fsdp::{BackwardPrefetch, FsdpStrategy, FullyShardedOptions, IgnoredModules, WrapPolicy};
use sconce_zero::{EngineOptions, Gathering, ParameterInfo, Placement, Residence, Tier, UnitCandidate};

use FsdpStrategy::{FullShard, HybridShard, HybridShardZero2, NoShard, ShardGradOp};

fn with_strategy(strategy: FsdpStrategy) -> FullyShardedOptions {
    FullyShardedOptions {
        sharding_strategy: Some(strategy),
        auto_wrap_policy: Some(WrapPolicy::transformer_based([])),
        ..FullyShardedOptions::default()
    }
}

fn weight(name: &str) -> ParameterInfo {
    ParameterInfo {
        name: name.into(),
        shape: vec![3, 2],
    }
}

#[test]
fn every_strategy_but_no_shard_shards_everything_however_small() {
    let sharded = Placement {
        parameter: Residence::Sharded,
        gradient: Residence::Sharded,
        optimizer_state: Residence::Sharded,
        ..Placement::REPLICATED
    };
    for (strategy, name, expected) in [
        (FullShard, "full_shard", sharded),
        (ShardGradOp, "shard_grad_op", sharded),
        (NoShard, "no_shard", Placement::REPLICATED),
        (HybridShard, "hybrid_shard", sharded),
        (HybridShardZero2, "hybrid_shard_zero2", sharded),
    ] {
        let run = with_strategy(strategy).resolve().unwrap();
        let placement = run.placement();
        assert_eq!((placement.name(), placement.place(&weight("norm"))), (name, expected));
    }
    let options = FullyShardedOptions {
        ignored_modules: Some(IgnoredModules::new("router").unwrap()),
        offload_params: Some(true),
        ..with_strategy(FullShard)
    };
    let placement = options.resolve().unwrap().placement();
    let (ignored, other) = (
        placement.place(&weight("router.weight")),
        placement.place(&weight("up.weight")),
    );
    assert_eq!(
        (ignored.parameter, ignored.gradient),
        (Residence::Replicated, Residence::Replicated)
    );
    assert_eq!(ignored.parameter_tier, Tier::Device);
    assert_eq!(
        (other.parameter, other.parameter_tier),
        (Residence::Sharded, Tier::Host)
    );
    assert_eq!(other.optimizer_state_tier, Tier::Host);
}

#[test]
fn hybrid_groups_are_the_ranks_of_a_host_or_as_many_as_asked_for() {
    // Strategy, group asked for, ranks, ranks of a host, and the group that comes of them.
    let rows = [
        (FullShard, None, 4, 2, None),
        (HybridShard, None, 4, 2, Some(2)),
        (HybridShardZero2, None, 6, 3, Some(3)),
        (HybridShard, Some(2), 4, 4, Some(2)),
        (HybridShard, Some(1), 4, 4, Some(1)),
        // One host: as without groups.
        (HybridShard, None, 4, 4, None),
    ];
    for (strategy, shard_group, ranks, per_host, expected) in rows {
        let options = FullyShardedOptions {
            shard_group,
            ..with_strategy(strategy)
        };
        let run = options.resolve().unwrap();
        assert_eq!(
            run.shard_group(ranks, per_host).unwrap(),
            expected,
            "{strategy:?} {ranks}"
        );
    }
    let run = with_strategy(HybridShard).resolve().unwrap();
    let error = run.engine_options(EngineOptions::default(), 5, 2).unwrap_err();
    assert_eq!(
        error.to_string(),
        "shard_group=\"2\": expected a divisor of the number of ranks, 5"
    );
}

#[test]
fn a_hybrid_strategy_with_one_group_is_told() {
    for (strategy, shard_group, ranks, per_host, expected) in [
        (HybridShard, None, 4, 4, Some("HYBRID_SHARD on one host is FULL_SHARD")),
        (
            HybridShardZero2,
            None,
            4,
            4,
            Some("HYBRID_SHARD_ZERO2 on one host is SHARD_GRAD_OP"),
        ),
        (HybridShard, None, 4, 2, None),
        (HybridShard, Some(2), 4, 4, None),
        (HybridShard, None, 1, 1, None),
        (FullShard, None, 4, 4, None),
    ] {
        let options = FullyShardedOptions {
            shard_group,
            ..with_strategy(strategy)
        };
        let notice = options.resolve().unwrap().notice_of_one_group(ranks, per_host);
        assert_eq!(notice.is_some(), expected.is_some(), "{strategy:?} {ranks} {per_host}");
        assert!(notice.unwrap_or_default().starts_with(expected.unwrap_or_default()));
    }
}

#[test]
fn gathers_run_ahead_only_where_prefetching_is_asked_for() {
    let gathering = |backward, forward, limit| {
        let options = FullyShardedOptions {
            backward_prefetch: backward,
            forward_prefetch: forward,
            limit_all_gathers: limit,
            ..FullyShardedOptions::default()
        };
        options.resolve().unwrap().gathering(Gathering::default())
    };
    let nothing = gathering(None, None, None);
    assert!(!nothing.forward_prefetch && nothing.reshard_after_forward);
    assert_eq!(
        (nothing.backward_prefetch, nothing.prefetch_units),
        (BackwardPrefetch::None, 1)
    );
    assert_eq!(nothing.max_live_elements, Gathering::default().max_live_elements);
    for backward in [BackwardPrefetch::Pre, BackwardPrefetch::Post] {
        let backward_prefetch = backward;
        let expected = Gathering {
            backward_prefetch,
            ..nothing.clone()
        };
        assert_eq!(gathering(Some(backward), None, None), expected);
    }
    let forward_prefetch = true;
    assert_eq!(
        gathering(None, Some(true), None),
        Gathering {
            forward_prefetch,
            ..nothing
        }
    );
    assert_eq!(gathering(None, None, Some(false)).max_live_elements, usize::MAX);
}

#[test]
fn units_groups_and_what_is_computed_again_reach_the_engine() {
    let layer = UnitCandidate {
        name: "layers.0",
        class: "Layer",
        elements: 10,
    };
    let head = UnitCandidate { class: "Head", ..layer };
    // Strategy, policy and checkpointing; the group, and whether layer and head are units and computed again.
    let by_class = || WrapPolicy::transformer_based(["Layer"]);
    let rows = [
        (FullShard, by_class(), false, None, [true, false], [false, false]),
        (HybridShard, by_class(), true, Some(2), [true, false], [true, false]),
        (
            HybridShardZero2,
            WrapPolicy::NoWrap,
            true,
            Some(2),
            [false, false],
            [true, true],
        ),
        (
            ShardGradOp,
            WrapPolicy::SizeBased { min_num_params: 11 },
            true,
            None,
            [false, false],
            [false, false],
        ),
    ];
    for (strategy, policy, checkpointing, group, units, again) in rows {
        let options = FullyShardedOptions {
            auto_wrap_policy: Some(policy),
            activation_checkpointing: Some(checkpointing),
            ..with_strategy(strategy)
        };
        let run = options.resolve().unwrap();
        let options = run.engine_options(EngineOptions::default(), 4, 2).unwrap();
        assert_eq!(options.shard_group, group);
        assert_eq!(
            [layer, head].map(|part| options.units.chooses(&part)),
            units,
            "{strategy:?}"
        );
        assert_eq!(
            [layer, head].map(|part| options.recompute.chooses(&part)),
            again,
            "{strategy:?}"
        );
        assert_eq!(
            options.gathering.reshard_after_forward,
            matches!(strategy, FullShard | HybridShard)
        );
    }
}
