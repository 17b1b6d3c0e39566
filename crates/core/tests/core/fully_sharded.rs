//! Fully sharded data parallelism from code and Accelerate's variables, in tables.

use candle_core::{DType, Device};
use sconce_core::deepspeed::{DeepSpeedConfig, MixedPrecision, Validation};
use sconce_core::{
    AcceleratorBuilder, BackwardPrefetch, DataParallel, Error, FsdpStrategy, FsdpVersion, FullySharded,
    FullyShardedOptions, Gathering, PrecisionPolicy, Result, RunSettings, Sharding, StateDictType, Tier, WrapPolicy,
};

fn settings(builder: &AcceleratorBuilder, variables: &[(&str, &str)]) -> Result<RunSettings> {
    builder.settings(2, |name| {
        let found = variables.iter().find(|(key, _)| name == *key);
        found.map(|(_, value)| (*value).to_owned())
    })
}

/// What the variables (without `FSDP_` in front) say, with FSDP in use.
fn with_variables(variables: &[(&str, &str)]) -> Result<RunSettings> {
    let names = Vec::from_iter(variables.iter().map(|(name, _)| format!("FSDP_{name}")));
    let named = names
        .iter()
        .zip(variables)
        .map(|(name, (_, value))| (name.as_str(), *value));
    let all = Vec::from_iter([("ACCELERATE_USE_FSDP", "true")].into_iter().chain(named));
    settings(&AcceleratorBuilder::default(), &all)
}

fn run(variables: &[(&str, &str)]) -> FullySharded {
    with_variables(variables)
        .unwrap()
        .fully_sharded
        .expect("FSDP is in use")
}

#[track_caller]
fn assert_refused(outcome: Result<RunSettings>, parts: &[&str]) {
    let message = outcome.expect_err("refused").to_string();
    for part in parts {
        assert!(message.contains(part), "{part:?} in {message:?}");
    }
}

#[test]
fn fsdp_is_in_use_where_code_or_accelerates_variable_asks_for_it() {
    for (value, expected) in [("true", true), ("1", true), ("False", false), ("", false)] {
        let variables = [("ACCELERATE_USE_FSDP", value), ("FSDP_SHARDING_STRATEGY", "NO_SHARD")];
        let found = settings(&AcceleratorBuilder::default(), &variables).unwrap();
        assert_eq!(found.fully_sharded.is_some(), expected, "{value}");
    }
    // Variables of something that is not in use are not looked at.
    let unasked = [("FSDP_VERSION", "7")];
    let found = settings(&AcceleratorBuilder::default(), &unasked).unwrap();
    assert_eq!(found.sharding, Sharding::DataParallel);
    let code = AcceleratorBuilder::default().fully_sharded(FullyShardedOptions::default());
    assert!(settings(&code, &unasked).unwrap().fully_sharded.is_some());
}

#[test]
fn what_accelerates_launcher_exports_by_default_is_full_shard_and_only_the_missing_policy_is_told() {
    let exported = [
        ("VERSION", "1"),
        ("SHARDING_STRATEGY", "FULL_SHARD"),
        ("RESHARD_AFTER_FORWARD", "true"),
        ("OFFLOAD_PARAMS", "false"),
        ("MIN_NUM_PARAMS", "100000000"),
        ("FORWARD_PREFETCH", "false"),
        ("USE_ORIG_PARAMS", "true"),
        ("CPU_RAM_EFFICIENT_LOADING", "true"),
        ("SYNC_MODULE_STATES", "true"),
        ("ACTIVATION_CHECKPOINTING", "false"),
    ];
    let run = with_variables(&exported).unwrap();
    let expected = Sharding::FullySharded {
        strategy: FsdpStrategy::FullShard,
        parameters: Tier::Device,
        optimizer_state: Tier::Device,
    };
    assert_eq!((run.sharding.clone(), run.precision), (expected, MixedPrecision::No));
    let ahead = (run.gathering.forward_prefetch, run.gathering.backward_prefetch);
    assert_eq!(ahead, (false, BackwardPrefetch::None));
    let notices = run.notices(&Device::Cpu);
    assert!(
        notices.len() == 1 && notices[0].starts_with("auto_wrap_policy=NO_WRAP"),
        "{notices:?}"
    );

    let wrapped = [&exported[..], &[("AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")]].concat();
    assert_eq!(with_variables(&wrapped).unwrap().notices(&Device::Cpu), [""; 0]);
    // The same in version 2, where the exported strategy means nothing.
    let mut second = wrapped;
    second[0] = ("VERSION", "2");
    let run = with_variables(&second).unwrap();
    assert_eq!(run.notices(&Device::Cpu), [""; 0]);
    let ahead = (run.gathering.forward_prefetch, run.gathering.backward_prefetch);
    assert_eq!(ahead, (false, BackwardPrefetch::Pre));
}

#[test]
fn every_variable_reaches_its_switch() {
    let found = run(&[
        ("SHARDING_STRATEGY", "2"),
        ("AUTO_WRAP_POLICY", "transformer_based_wrap"),
        ("TRANSFORMER_CLS_TO_WRAP", "LlamaDecoderLayer, Embedding"),
        ("IGNORED_MODULES", r"lm_head"),
        ("BACKWARD_PREFETCH", "backward_post"),
        ("FORWARD_PREFETCH", "True"),
        ("OFFLOAD_PARAMS", "true"),
        ("ACTIVATION_CHECKPOINTING", "true"),
        ("STATE_DICT_TYPE", "SHARDED_STATE_DICT"),
    ]);
    assert_eq!(
        (found.version, found.strategy),
        (FsdpVersion::One, FsdpStrategy::ShardGradOp)
    );
    let WrapPolicy::TransformerBased { classes } = &found.auto_wrap_policy else {
        panic!("{:?}", found.auto_wrap_policy)
    };
    assert_eq!(*classes, ["LlamaDecoderLayer", "Embedding"]);
    assert_eq!(found.ignored_modules.unwrap().pattern(), "lm_head");
    assert_eq!(
        (found.backward_prefetch, found.forward_prefetch),
        (BackwardPrefetch::Post, true)
    );
    assert!(found.offload_params && found.activation_checkpointing);
    assert_eq!(found.state_dict_type, StateDictType::Sharded);

    let found = run(&[("VERSION", "2"), ("RESHARD_AFTER_FORWARD", "false")]);
    assert_eq!(
        (found.version, found.strategy),
        (FsdpVersion::Two, FsdpStrategy::ShardGradOp)
    );
    let found = run(&[("RESHARD_AFTER_FORWARD", "hybrid_shard")]);
    assert_eq!(found.strategy, FsdpStrategy::HybridShard);
    for (size, expected) in [("2000", 2000), ("", 100_000_000)] {
        let found = run(&[("AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"), ("MIN_NUM_PARAMS", size)]);
        assert!(
            matches!(found.auto_wrap_policy, WrapPolicy::SizeBased { min_num_params } if min_num_params == expected),
            "{size}"
        );
    }
}

#[test]
fn variables_that_cannot_be_used_are_refused_with_name_value_and_the_valid_ones() {
    for (name, value, expected) in [
        ("VERSION", "3", "expected 1 or 2"),
        (
            "SHARDING_STRATEGY",
            "6",
            "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2",
        ),
        ("SHARDING_STRATEGY", "0", "number from 1 to 5"),
        ("RESHARD_AFTER_FORWARD", "perhaps", "true or false (version 2)"),
        (
            "AUTO_WRAP_POLICY",
            "WRAP",
            "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP",
        ),
        (
            "TRANSFORMER_CLS_TO_WRAP",
            "Block",
            "FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP only, and it is not set",
        ),
        ("MIN_NUM_PARAMS", "1e8", "whole number above 0"),
        ("IGNORED_MODULES", "(", "regular expression"),
        ("BACKWARD_PREFETCH", "PRE", "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH"),
        ("FORWARD_PREFETCH", "maybe", "true or false"),
        ("OFFLOAD_PARAMS", "cpu", "true or false"),
        ("ACTIVATION_CHECKPOINTING", "2", "true or false"),
        (
            "STATE_DICT_TYPE",
            "FULL",
            "FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT",
        ),
        ("USE_ORIG_PARAMS", "-", "true or false"),
        ("SYNC_MODULE_STATES", "-", "true or false"),
        ("CPU_RAM_EFFICIENT_LOADING", "-", "true or false"),
    ] {
        let outcome = with_variables(&[(name, value)]);
        assert!(matches!(outcome, Err(Error::Setting { .. })), "{name}={value}");
        assert_refused(outcome, &[&format!("FSDP_{name}={value:?}"), expected]);
    }
    let outcome = with_variables(&[("SYNC_MODULE_STATES", "false"), ("CPU_RAM_EFFICIENT_LOADING", "true")]);
    assert!(matches!(outcome, Err(Error::FullySharded(_))), "{outcome:?}");
    assert_refused(outcome, &["sync_module_states=\"false\"", "cpu_ram_efficient_loading"]);
}

#[test]
fn code_wins_over_the_environment_switch_by_switch() {
    let code = AcceleratorBuilder::default().fully_sharded(FullyShardedOptions {
        sharding_strategy: Some(FsdpStrategy::NoShard),
        ..FullyShardedOptions::default()
    });
    let variables = [
        ("ACCELERATE_USE_FSDP", "true"),
        ("FSDP_SHARDING_STRATEGY", "FULL_SHARD"),
        ("FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE"),
    ];
    let run = settings(&code, &variables).unwrap().fully_sharded.unwrap();
    assert_eq!(
        (run.strategy, run.backward_prefetch),
        (FsdpStrategy::NoShard, BackwardPrefetch::Pre)
    );
    let gathering = Gathering {
        prefetch_elements: 7,
        ..Gathering::default()
    };
    let run = settings(&code.gathering(gathering.clone()), &[]).unwrap();
    assert_eq!(run.gathering, gathering);
    let run = settings(&AcceleratorBuilder::default().strategy(DataParallel), &variables).unwrap();
    assert_eq!(run.sharding, Sharding::Custom("data_parallel".into()));
    assert!(run.fully_sharded.is_some());
    let notices = run.notices(&Device::Cpu);
    assert!(
        notices
            .iter()
            .any(|notice| notice.contains("own sharding strategy, data_parallel")),
        "{notices:?}"
    );
    let both = AcceleratorBuilder::default()
        .strategy(DataParallel)
        .fully_sharded(FullyShardedOptions::default());
    assert_refused(
        settings(&both, &[]),
        &["AcceleratorBuilder::fully_sharded and AcceleratorBuilder::strategy exclude"],
    );
}

#[test]
fn the_precision_policy_is_the_precision_of_the_run_and_code_must_not_say_two() {
    let policy = |dtype| FullyShardedOptions {
        mixed_precision_policy: Some(PrecisionPolicy {
            param_dtype: dtype,
            ..PrecisionPolicy::default()
        }),
        ..FullyShardedOptions::default()
    };
    let bf16 = [("ACCELERATE_MIXED_PRECISION", "bf16")];
    for (dtype, expected) in [
        (None, MixedPrecision::Bf16),
        (Some(DType::F32), MixedPrecision::No),
        (Some(DType::F16), MixedPrecision::Fp16),
    ] {
        let code = AcceleratorBuilder::default().fully_sharded(policy(dtype));
        assert_eq!(settings(&code, &bf16).unwrap().precision, expected);
    }
    let code = AcceleratorBuilder::default()
        .fully_sharded(policy(Some(DType::F16)))
        .mixed_precision(MixedPrecision::Bf16);
    assert_refused(
        settings(&code, &[]),
        &["mixed_precision=\"bf16\"", "param_dtype is fp16"],
    );
}

#[test]
fn fsdp_and_deepspeed_exclude_each_other_whoever_asks() {
    let fsdp = || AcceleratorBuilder::default().fully_sharded(FullyShardedOptions::default());
    let config = || DeepSpeedConfig::parse("{}", "ds.json", Validation::Lenient).unwrap();
    let (use_fsdp, use_deepspeed) = (("ACCELERATE_USE_FSDP", "true"), ("ACCELERATE_USE_DEEPSPEED", "true"));
    for (outcome, parts) in [
        (
            settings(&AcceleratorBuilder::default(), &[use_fsdp, use_deepspeed]),
            [
                "ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED exclude",
                "leave out one of the two",
            ],
        ),
        (
            settings(&fsdp(), &[use_deepspeed]),
            ["AcceleratorBuilder::fully_sharded and", "ACCELERATE_USE_DEEPSPEED"],
        ),
        (
            settings(&AcceleratorBuilder::default().deepspeed(config()), &[use_fsdp]),
            ["ACCELERATE_USE_FSDP and", "AcceleratorBuilder::deepspeed"],
        ),
        (
            settings(&fsdp().deepspeed(config()), &[]),
            ["AcceleratorBuilder::fully_sharded and", "AcceleratorBuilder::deepspeed"],
        ),
    ] {
        assert!(matches!(outcome, Err(Error::Exclusive { .. })), "{outcome:?}");
        assert_refused(outcome, &parts);
    }
}
