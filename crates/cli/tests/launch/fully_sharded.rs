//! Accelerate's flags for FSDP: what reaches the ranks, and what is refused before any starts.

use super::*;

/// Prints the variables of FSDP, in order.
const SHOW: &str = "env | grep -E '^(ACCELERATE|FSDP)_' | grep -v _DYNAMO_ | sort";

/// What Accelerate's launcher exports for `--use_fsdp` alone.
const BY_DEFAULT: [(&str, &str); 13] = [
    ("ACCELERATE_MIXED_PRECISION", "no"),
    ("ACCELERATE_USE_FSDP", "true"),
    ("FSDP_ACTIVATION_CHECKPOINTING", "false"),
    ("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "false"),
    ("FSDP_CPU_RAM_EFFICIENT_LOADING", "true"),
    ("FSDP_FORWARD_PREFETCH", "false"),
    ("FSDP_MIN_NUM_PARAMS", "100000000"),
    ("FSDP_OFFLOAD_PARAMS", "false"),
    ("FSDP_RESHARD_AFTER_FORWARD", "true"),
    ("FSDP_SHARDING_STRATEGY", "FULL_SHARD"),
    ("FSDP_SYNC_MODULE_STATES", "true"),
    ("FSDP_USE_ORIG_PARAMS", "true"),
    ("FSDP_VERSION", "1"),
];

/// The default variables with others in their places or beside them, as [`SHOW`] prints them.
fn by_default_but(others: &[(&str, &str)]) -> String {
    let mut variables = BTreeMap::from(BY_DEFAULT);
    variables.extend(others.iter().copied());
    variables
        .iter()
        .map(|(name, value)| format!("{name}={value}\n"))
        .collect()
}

/// Launches with flags; expects one message with all `parts`, exit code 2 and no rank started.
#[track_caller]
fn assert_refused(flags: &[&str], parts: &[&str]) {
    let mut launch = Launch::new(&[&["-n", "2"], flags].concat(), ": > started.$RANK");
    let output = launch.output();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{flags:?}: {stderr}");
    assert!(
        stderr.starts_with("error: ") && stderr.matches("error: ").count() == 1,
        "{stderr}"
    );
    for part in parts {
        assert!(stderr.contains(part), "{flags:?}: {part:?} in {stderr:?}");
    }
    assert!(!launch.path("started.0").exists() && !launch.path("started.1").exists());
}

#[test]
fn use_fsdp_exports_what_accelerates_launcher_exports() {
    let output = Launch::new(&["--use_fsdp"], SHOW).output();
    assert_eq!(text(&output.stdout), by_default_but(&[]), "{output:?}");
    assert_eq!(text(&output.stderr), "");
    // Without it, nothing of FSDP's; what is inherited stays.
    assert_eq!(
        text(&Launch::new(&[], SHOW).output().stdout),
        "ACCELERATE_MIXED_PRECISION=no\n"
    );
    let mut launch = Launch::new(&["--use_fsdp"], SHOW);
    launch.command.env("FSDP_SHARDING_STRATEGY", "NO_SHARD");
    let output = launch.output();
    assert_eq!(
        text(&output.stdout),
        by_default_but(&[("FSDP_SHARDING_STRATEGY", "NO_SHARD")])
    );
    assert_eq!(text(&output.stderr), "");
}

#[test]
fn every_flag_of_fsdp_reaches_the_ranks_as_accelerates_variable() {
    let flags = [
        "--use_fsdp",
        "--fsdp_version=1",
        "--fsdp_sharding_strategy",
        "2",
        "--fsdp-reshard-after-forward",
        "true",
        "--fsdp_auto_wrap_policy",
        "TRANSFORMER_BASED_WRAP",
        "--fsdp_transformer_layer_cls_to_wrap",
        "LlamaDecoderLayer,Embedding",
        "--fsdp_backward_prefetch",
        "BACKWARD_PRE",
        "--fsdp_forward_prefetch",
        "True",
        "--fsdp_state_dict_type",
        "FULL_STATE_DICT",
        "--fsdp-use-orig-params",
        "1",
        "--fsdp_cpu_ram_efficient_loading",
        "false",
        "--fsdp_sync_module_states",
        "yes",
        "--fsdp_activation_checkpointing",
        "true",
        "--fsdp_offload_params",
        "true",
        "--mixed_precision",
        "bf16",
    ];
    let output = Launch::new(&flags, SHOW).output();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let expected = by_default_but(&[
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true"),
        ("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"),
        ("FSDP_BACKWARD_PREFETCH", "BACKWARD_PRE"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "false"),
        ("FSDP_FORWARD_PREFETCH", "true"),
        ("FSDP_OFFLOAD_PARAMS", "true"),
        ("FSDP_SHARDING_STRATEGY", "2"),
        ("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT"),
        ("FSDP_TRANSFORMER_CLS_TO_WRAP", "LlamaDecoderLayer,Embedding"),
    ]);
    assert_eq!(text(&output.stdout), expected);

    let size = [
        "--fsdp_auto_wrap_policy",
        "SIZE_BASED_WRAP",
        "--fsdp_min_num_params",
        "2000",
    ];
    let output = Launch::new(&[&["--use_fsdp"][..], &size].concat(), SHOW).output();
    let expected = [
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP"),
        ("FSDP_MIN_NUM_PARAMS", "2000"),
    ];
    assert_eq!(text(&output.stdout), by_default_but(&expected), "{output:?}");
}

#[test]
fn flags_of_fsdp_need_use_fsdp_and_exclude_deepspeed() {
    assert_refused(
        &["--fsdp_sharding_strategy", "FULL_SHARD"],
        &["error: --fsdp_sharding_strategy needs --use_fsdp\n"],
    );
    assert_refused(
        &["--fsdp_version", "2", "--fsdp_offload_params", "true"],
        &["error: --fsdp_version, --fsdp_offload_params need --use_fsdp\n"],
    );
    assert_refused(
        &["--use_fsdp", "--zero_stage", "2"],
        &["error: --zero_stage needs --use_deepspeed\n"],
    );
    assert_refused(
        &["--use_fsdp", "--use_deepspeed"],
        &["error: --use_deepspeed and --use_fsdp exclude each other\nhint: "],
    );
    let mut launch = Launch::new(&["-n", "2", "--use_fsdp"], ": > started.$RANK");
    let output = launch.command.env("ACCELERATE_USE_DEEPSPEED", "true").output().unwrap();
    let message = "error: ACCELERATE_USE_FSDP and ACCELERATE_USE_DEEPSPEED exclude each other";
    assert!(text(&output.stderr).starts_with(message), "{output:?}");
    assert!(!launch.path("started.0").exists());
}

#[test]
fn values_that_cannot_be_are_told_in_the_words_of_the_flags_with_the_valid_ones() {
    for (flag, value, expected) in [
        ("--fsdp_version", "3", "expected 1 or 2"),
        (
            "--fsdp_sharding_strategy",
            "FULL",
            "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD",
        ),
        ("--fsdp_sharding_strategy", "6", "number from 1 to 5"),
        ("--fsdp_reshard_after_forward", "no_idea", "true or false (version 2)"),
        ("--fsdp_reshard_after_forward", "false", "SHARD_GRAD_OP is what keeps"),
        (
            "--fsdp_auto_wrap_policy",
            "LAYERS",
            "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP",
        ),
        (
            "--fsdp_transformer_layer_cls_to_wrap",
            "Block",
            "TRANSFORMER_BASED_WRAP only",
        ),
        (
            "--fsdp_backward_prefetch",
            "PRE",
            "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH",
        ),
        (
            "--fsdp_state_dict_type",
            "FULL",
            "FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT",
        ),
        (
            "--fsdp_sync_module_states",
            "false",
            "cpu_ram_efficient_loading is true and needs it",
        ),
    ] {
        assert_refused(
            &["--use_fsdp", flag, value],
            &[&format!("error: {flag} {value}: "), expected],
        );
    }
    for flag in [
        "--fsdp_forward_prefetch",
        "--fsdp_offload_params",
        "--fsdp_activation_checkpointing",
        "--fsdp_use_orig_params",
        "--fsdp_cpu_ram_efficient_loading",
        "--fsdp_sync_module_states",
    ] {
        assert_refused(
            &["--use_fsdp", flag, "maybe"],
            &[flag, "maybe", "expected true or false"],
        );
    }
    let refused = |flags: &[&str], parts: &[&str]| assert_refused(&[&["--use_fsdp"], flags].concat(), parts);
    refused(
        &["--fsdp_min_num_params", "1000"],
        &["error: --fsdp_min_num_params needs --fsdp_auto_wrap_policy SIZE_BASED_WRAP"],
    );
    refused(
        &[
            "--fsdp_auto_wrap_policy",
            "SIZE_BASED_WRAP",
            "--fsdp_min_num_params",
            "1e8",
        ],
        &["error: --fsdp_min_num_params 1e8: expected a whole number above 0"],
    );
    refused(
        &["--fsdp_version", "2", "--fsdp_forward_prefetch", "true"],
        &["error: --fsdp_forward_prefetch true: version 2 does not have it"],
    );
    refused(
        &["--fsdp_version", "2", "--fsdp_reshard_after_forward", "FULL_SHARD"],
        &["error: --fsdp_reshard_after_forward FULL_SHARD: expected true or false in version 2"],
    );
    refused(
        &["--fsdp_sharding_strategy", "NO_SHARD", "--fsdp_offload_params", "true"],
        &["error: --fsdp_offload_params true: the strategy is NO_SHARD"],
    );
}
