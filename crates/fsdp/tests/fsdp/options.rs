//! What comes of the switches: defaults by version, the two meanings of `reshard_after_forward`, what is refused.

use candle_core::DType;
use sconce_fsdp::{
    BackwardPrefetch, Error, FsdpStrategy, FsdpVersion, FullyShardedOptions, IgnoredModules, PrecisionPolicy,
    ReshardAfterForward, StateDictType, WrapPolicy,
};

use BackwardPrefetch::{Post, Pre};
use FsdpStrategy::{FullShard, HybridShard, HybridShardZero2, NoShard, ShardGradOp};
use ReshardAfterForward::{Bool, Strategy};

fn version_2() -> FullyShardedOptions {
    FullyShardedOptions {
        version: Some(FsdpVersion::Two),
        ..FullyShardedOptions::default()
    }
}

#[test]
fn defaults_are_those_of_accelerates_plugin() {
    let run = FullyShardedOptions::default().resolve().unwrap();
    assert_eq!((run.version, run.strategy), (FsdpVersion::One, FullShard));
    assert!(matches!(run.auto_wrap_policy, WrapPolicy::NoWrap) && run.ignored_modules.is_none());
    assert_eq!(run.backward_prefetch, BackwardPrefetch::None);
    assert!(!run.forward_prefetch && run.limit_all_gathers && !run.offload_params);
    assert!(!run.activation_checkpointing && run.ranks_per_group.is_none());
    assert_eq!(run.state_dict_type, StateDictType::Full);
    assert_eq!(run.precision, PrecisionPolicy::default());

    let run = version_2().resolve().unwrap();
    assert_eq!((run.version, run.strategy), (FsdpVersion::Two, FullShard));
    assert_eq!(
        (run.backward_prefetch, run.state_dict_type),
        (Pre, StateDictType::Sharded)
    );
}

#[test]
fn the_strategy_follows_from_either_versions_names() {
    /// Version 2 or not, strategy, resharding and group as said, and what comes of them.
    type Row = (
        bool,
        Option<FsdpStrategy>,
        Option<ReshardAfterForward>,
        Option<usize>,
        FsdpStrategy,
    );
    let rows: [Row; 13] = [
        (false, Some(ShardGradOp), None, None, ShardGradOp),
        (false, Some(NoShard), Some(Bool(true)), None, NoShard),
        (false, Some(HybridShard), None, Some(2), HybridShard),
        (false, None, Some(Strategy(ShardGradOp)), None, ShardGradOp),
        (
            false,
            Some(FullShard),
            Some(Strategy(HybridShardZero2)),
            None,
            HybridShardZero2,
        ),
        (false, Some(NoShard), Some(Strategy(NoShard)), None, NoShard),
        (true, None, Some(Bool(true)), None, FullShard),
        (true, None, Some(Bool(false)), None, ShardGradOp),
        (true, None, None, Some(2), HybridShard),
        (true, None, Some(Bool(false)), Some(2), HybridShardZero2),
        // Accelerate's launcher exports a strategy in version 2 too, where it says nothing.
        (true, Some(FullShard), Some(Bool(false)), None, ShardGradOp),
        (true, Some(NoShard), None, None, FullShard),
        (true, Some(NoShard), Some(Bool(true)), None, FullShard),
    ];
    for (is_two, sharding_strategy, reshard_after_forward, shard_group, expected) in rows {
        let options = FullyShardedOptions {
            version: is_two.then_some(FsdpVersion::Two),
            sharding_strategy,
            reshard_after_forward,
            shard_group,
            ..FullyShardedOptions::default()
        };
        let shown = format!("{options:?}");
        assert_eq!(options.resolve().unwrap().strategy, expected, "{shown}");
    }
}

#[test]
fn what_does_not_go_together_is_refused_by_name() {
    let one = FullyShardedOptions::default;
    let rows = [
        (
            FullyShardedOptions {
                reshard_after_forward: Some(Bool(false)),
                ..one()
            },
            "reshard_after_forward",
            "SHARD_GRAD_OP",
        ),
        (
            FullyShardedOptions {
                sharding_strategy: Some(NoShard),
                reshard_after_forward: Some(Strategy(ShardGradOp)),
                ..one()
            },
            "reshard_after_forward",
            "sharding_strategy is NO_SHARD",
        ),
        (
            FullyShardedOptions {
                reshard_after_forward: Some(Strategy(FullShard)),
                ..version_2()
            },
            "reshard_after_forward",
            "true or false in version 2",
        ),
        (
            FullyShardedOptions {
                forward_prefetch: Some(true),
                ..version_2()
            },
            "forward_prefetch",
            "use version 1",
        ),
        (
            FullyShardedOptions {
                state_dict_type: Some(StateDictType::Local),
                ..version_2()
            },
            "state_dict_type",
            "FULL_STATE_DICT and SHARDED_STATE_DICT",
        ),
        (
            FullyShardedOptions {
                cpu_ram_efficient_loading: Some(true),
                sync_module_states: Some(false),
                ..one()
            },
            "sync_module_states",
            "cpu_ram_efficient_loading",
        ),
        (
            FullyShardedOptions {
                sharding_strategy: Some(NoShard),
                offload_params: Some(true),
                ..one()
            },
            "offload_params",
            "NO_SHARD",
        ),
        (
            FullyShardedOptions {
                shard_group: Some(2),
                ..one()
            },
            "shard_group",
            "HYBRID_SHARD",
        ),
        (
            FullyShardedOptions {
                shard_group: Some(0),
                ..version_2()
            },
            "shard_group",
            "a number of ranks",
        ),
        (
            FullyShardedOptions {
                mixed_precision_policy: Some(PrecisionPolicy {
                    param_dtype: Some(DType::U8),
                    ..PrecisionPolicy::default()
                }),
                ..one()
            },
            "param_dtype",
            "f32, bf16 or f16",
        ),
    ];
    for (options, name, part) in rows {
        let error = options.resolve().unwrap_err();
        assert!(
            matches!(&error, Error::Setting { setting, .. } if *setting == name),
            "{error}"
        );
        assert!(error.to_string().contains(part), "{part:?} in {error}");
    }
}

#[test]
fn what_does_nothing_here_is_accepted_and_said_once_each() {
    let wrapped = || FullyShardedOptions {
        auto_wrap_policy: Some(WrapPolicy::transformer_based(["Layer"])),
        ..FullyShardedOptions::default()
    };
    let rows: [(FullyShardedOptions, &[&str]); 7] = [
        (wrapped(), &[]),
        // What Accelerate's launcher always exports.
        (
            FullyShardedOptions {
                use_orig_params: Some(true),
                sync_module_states: Some(true),
                cpu_ram_efficient_loading: Some(true),
                reshard_after_forward: Some(Bool(true)),
                ..wrapped()
            },
            &[],
        ),
        (FullyShardedOptions::default(), &["NO_WRAP"]),
        (
            FullyShardedOptions {
                sharding_strategy: Some(NoShard),
                ..FullyShardedOptions::default()
            },
            &[],
        ),
        (
            FullyShardedOptions {
                use_orig_params: Some(false),
                sync_module_states: Some(false),
                ..wrapped()
            },
            &["use_orig_params", "sync_module_states"],
        ),
        (
            FullyShardedOptions {
                version: Some(FsdpVersion::Two),
                sharding_strategy: Some(NoShard),
                backward_prefetch: Some(Post),
                ..wrapped()
            },
            &["sharding_strategy", "backward_prefetch"],
        ),
        (
            FullyShardedOptions {
                state_dict_type: Some(StateDictType::Sharded),
                ..wrapped()
            },
            &["state_dict_type"],
        ),
    ];
    for (options, parts) in rows {
        let run = options.resolve().unwrap();
        assert_eq!(run.notices().len(), parts.len(), "{:?}", run.notices());
        for (notice, part) in run.notices().iter().zip(parts) {
            assert!(notice.contains(part), "{part} in {notice}");
        }
    }
}

#[test]
fn what_is_said_first_wins_setting_by_setting() {
    let first = FullyShardedOptions {
        sharding_strategy: Some(ShardGradOp),
        auto_wrap_policy: Some(WrapPolicy::NoWrap),
        ..FullyShardedOptions::default()
    };
    let second = FullyShardedOptions {
        sharding_strategy: Some(NoShard),
        auto_wrap_policy: Some(WrapPolicy::SizeBased { min_num_params: 1 }),
        ignored_modules: Some(IgnoredModules::new("head").unwrap()),
        backward_prefetch: Some(Post),
        limit_all_gathers: Some(false),
        ..FullyShardedOptions::default()
    };
    let run = first.or(second).resolve().unwrap();
    assert_eq!((run.strategy, run.backward_prefetch), (ShardGradOp, Post));
    assert!(matches!(run.auto_wrap_policy, WrapPolicy::NoWrap) && !run.limit_all_gathers);
    assert_eq!(run.ignored_modules.unwrap().pattern(), "head");
}
