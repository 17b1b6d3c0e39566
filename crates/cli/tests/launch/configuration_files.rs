//! `sconce launch --config_file`: who wins, what reaches the ranks, and what errors say.

use super::*;

/// Prints what the ranks are told.
const SHOW: &str = "env | grep -E '^(ACCELERATE|FSDP|PARALLELISM_CONFIG|SCONCE_DEVICE|SCONCE_BACKEND|WORLD_SIZE)' | grep -v _DYNAMO_ | sort";

fn launch(flags: &[&str], files: &[(&str, &str)], script: &str) -> Launch {
    let launch = Launch::new(flags, script);
    for (name, content) in files {
        let file = launch.path(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, content).unwrap();
    }
    launch
}

#[track_caller]
fn told(launch: &mut Launch) -> BTreeMap<String, String> {
    let output = launch.output();
    assert!(output.status.success(), "{output:?}");
    let lines = text(&output.stdout);
    lines
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
}

#[track_caller]
fn assert_refused(flags: &[&str], config: &str, parts: &[&str]) {
    let mut launch = launch(flags, &[("run.yaml", config)], ": > started");
    let output = launch.output();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{config}: {stderr}");
    assert_eq!(stderr.matches("error: ").count(), 1, "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{part:?} in {stderr:?}");
    }
    assert!(!launch.path("started").exists());
}

#[test]
fn flags_win_over_variables_and_those_over_files_and_later_files_over_earlier() {
    let first = "distributed_type: FSDP\nmixed_precision: fp16\nuse_cpu: true\nfsdp_config:\n  fsdp_version: 2\n  \
                 fsdp_offload_params: true\n  fsdp_state_dict_type: FULL_STATE_DICT\n";
    let second = "mixed_precision = \"no\"\n[fsdp_config]\nfsdp_state_dict_type = \"SHARDED_STATE_DICT\"\n";
    let files = [("a.yaml", first), ("b.toml", second)];
    let flags = ["--config_file", "a.yaml", "--config-file", "b.toml"];
    let told_all = told(&mut launch(&flags, &files, SHOW));
    for (name, value) in [
        ("ACCELERATE_USE_CPU", "True"),
        ("ACCELERATE_USE_FSDP", "true"),
        ("FSDP_VERSION", "2"),
        ("FSDP_OFFLOAD_PARAMS", "true"),
        ("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT"),
        ("ACCELERATE_MIXED_PRECISION", "no"),
    ] {
        assert_eq!(told_all.get(name).map(String::as_str), Some(value), "{name}");
    }
    let mut with_variable = launch(&flags, &files, SHOW);
    with_variable
        .command
        .env("ACCELERATE_MIXED_PRECISION", "bf16")
        .env("FSDP_OFFLOAD_PARAMS", "false");
    let told_variable = told(&mut with_variable);
    assert_eq!(told_variable["ACCELERATE_MIXED_PRECISION"], "bf16");
    assert_eq!(told_variable["FSDP_OFFLOAD_PARAMS"], "false");
    let flags = [&flags[..], &["--mixed_precision", "fp8", "--fsdp_version", "1"]].concat();
    let mut with_flags = launch(&flags, &files, SHOW);
    with_flags.command.env("ACCELERATE_MIXED_PRECISION", "bf16");
    let told_flags = told(&mut with_flags);
    assert_eq!(told_flags["ACCELERATE_MIXED_PRECISION"], "fp8");
    assert_eq!(told_flags["FSDP_VERSION"], "1");
}

#[test]
fn accelerates_default_file_is_read_where_none_is_named_but_not_with_cpu() {
    let config = "distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 2\n";
    let files = [("home/accelerate/default_config.yaml", config)];
    let script = "[ $RANK = 0 ] && env | grep -E '^(ACCELERATE_MIXED|WORLD)' | sort";
    let set_home = |launch: &mut Launch| {
        launch.command.env("HF_HOME", "home");
    };
    let mut by_default = launch(&["--no_prefix"], &files, script);
    set_home(&mut by_default);
    let output = by_default.output();
    assert_eq!(
        text(&output.stdout),
        "ACCELERATE_MIXED_PRECISION=bf16\nWORLD_SIZE=2\n",
        "{output:?}"
    );
    let mut on_cpu = launch(&["--cpu"], &files, script);
    set_home(&mut on_cpu);
    assert_eq!(
        text(&on_cpu.output().stdout),
        "ACCELERATE_MIXED_PRECISION=no\nWORLD_SIZE=1\n"
    );
    let mut named = launch(
        &["--config_file", "other.yaml"],
        &[files[0], ("other.yaml", "num_processes: 1\n")],
        script,
    );
    set_home(&mut named);
    assert_eq!(
        text(&named.output().stdout),
        "ACCELERATE_MIXED_PRECISION=no\nWORLD_SIZE=1\n"
    );
}

#[test]
fn a_flag_for_the_way_of_sharding_takes_the_place_of_the_files() {
    let config = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\ndeepspeed_config: {zero_stage: 1}\n";
    let told = told(&mut launch(
        &["--config_file", "run.yaml", "--use_deepspeed"],
        &[("run.yaml", config)],
        SHOW,
    ));
    assert_eq!(told["ACCELERATE_DEEPSPEED_ZERO_STAGE"], "1");
    assert!(
        !told
            .keys()
            .any(|name| name.starts_with("FSDP_") || name == "ACCELERATE_USE_FSDP"),
        "{told:?}"
    );
}

#[test]
fn deepspeeds_keys_inside_a_file_reach_the_ranks_as_accelerate_reads_them() {
    let config = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  zero3_init_flag: true\n  \
                  zero_optimization: {stage: 3}\n  bf16: {enabled: true}\n  gradient_accumulation_steps: 8\n";
    let told = told(&mut launch(
        &["--config_file", "run.yaml"],
        &[("run.yaml", config)],
        SHOW,
    ));
    // JSON in base64.
    let encoded = &told["ACCELERATE_DEEPSPEED_CONFIG_FILE"];
    assert!(encoded.starts_with("eyJi"), "{encoded}");
    assert_eq!(told["ACCELERATE_DEEPSPEED_ZERO3_INIT"], "true");
    assert_eq!(
        told["ACCELERATE_CONFIG_DS_FIELDS"],
        "deepspeed_config_file,zero3_init_flag,mixed_precision"
    );
    assert_refused(
        &["--config_file", "run.yaml"],
        &config.replace("mixed_precision: bf16", "mixed_precision: fp16"),
        &[
            "ACCELERATE_MIXED_PRECISION is fp16, `bf16.enabled` is true",
            "--mixed_precision is from run.yaml:2: `mixed_precision`",
        ],
    );
    assert_refused(
        &["--config_file", "run.yaml", "--zero_stage", "2"],
        config,
        &["decides already: --zero_stage (`zero_optimization.stage`)"],
    );
}

#[test]
fn the_two_files_with_deepspeeds_keys_inside_start_ranks_as_they_stand() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../core/tests/fixtures/configurations");
    for name in ["deepspeed_inline_bf16.yaml", "deepspeed_inline_fp16.yaml"] {
        let file = folder.join(name).display().to_string();
        let output = Launch::new(&["--config_file", &file], "echo $WORLD_SIZE").output();
        assert!(output.status.success(), "{name}: {output:?}");
        assert_eq!(text(&output.stdout).matches('8').count(), 8, "{output:?}");
        let told = text(&output.stderr);
        let once = told.matches("`zero_optimization.offload_optimizer_params` is deprecated");
        assert_eq!(once.count(), 1, "{told}");
    }
}

#[test]
fn groups_of_ranks_come_from_files_and_flags_and_must_make_the_world() {
    let config = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2}\nparallelism_config:\n  \
                  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n";
    let mut started = launch(
        &["--config_file", "run.yaml", "--no_prefix"],
        &[("run.yaml", config)],
        &format!("[ $RANK = 0 ] && {SHOW}; true"),
    );
    assert_eq!(told(&mut started)["PARALLELISM_CONFIG_DP_SHARD_SIZE"], "2");
    assert_refused(
        &["--config_file", "run.yaml", "-n", "6"],
        config,
        &["2 groups of 2 ranks", "the number of ranks, 6", "run.yaml:5"],
    );
    assert_refused(
        &["--config_file", "run.yaml", "--fsdp_version", "1"],
        config,
        &["a mesh needs FSDP's version 2"],
    );
}

#[test]
fn gpus_of_a_file_are_one_for_each_rank_and_none_of_the_cpus() {
    let config = "distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: 0\n";
    assert_refused(
        &["--config_file", "run.yaml"],
        config,
        &[
            "--gpu_ids names 1 GPU for 2 ranks",
            "--gpu_ids is from run.yaml:3: `gpu_ids`",
        ],
    );
    let script = "echo ${CUDA_VISIBLE_DEVICES-unset}";
    let output = launch(
        &["--config_file", "run.yaml", "--cpu", "--no_prefix"],
        &[("run.yaml", config)],
        script,
    )
    .output();
    assert_eq!(text(&output.stdout), "unset\nunset\n", "{output:?}");
}

#[test]
fn what_a_file_says_wrongly_is_told_with_its_place() {
    let flags = ["--config_file", "run.yaml"];
    assert_refused(
        &flags,
        "num_proceses: 2\n",
        &["run.yaml:1: `num_proceses`: unknown key", "`num_processes`"],
    );
    assert_refused(
        &flags,
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_forward_prefetch: true\n",
        &[
            "--fsdp_forward_prefetch true: version 2 does not have it",
            "hint: --fsdp_forward_prefetch is from run.yaml:4",
        ],
    );
    assert_refused(
        &flags,
        "distributed_type: FSDP\nfsdp_config: {fsdp_cpu_ram_efficient_loading: true, fsdp_sync_module_states: \"False\"}\n",
        &["sync_module_states", "run.yaml:2"],
    );
    assert_refused(&["--config_file", "none.yaml"], "", &["none.yaml: cannot be read"]);
    assert_refused(
        &flags,
        "num_processes: -1\n",
        &["run.yaml:1: `num_processes`: found -1"],
    );
}

#[test]
fn settings_without_a_flag_become_variables_and_what_has_no_effect_is_a_warning() {
    let config = "tpu_name: mine\nsconce_config: {device: cpu, timeout: 60, kill_grace: 3}\n";
    let files = [("run.yaml", config)];
    let script = "echo $SCONCE_DEVICE $SCONCE_TIMEOUT";
    let output = launch(&["--config_file", "run.yaml"], &files, script).output();
    assert_eq!(text(&output.stdout), "cpu 60\n", "{output:?}");
    assert_eq!(
        text(&output.stderr),
        "warning: run.yaml:1: `tpu_name`: has no effect here: candle does not run on TPUs\n"
    );
    let quiet = launch(&["--config_file", "run.yaml", "-q"], &files, script).output();
    assert_eq!(text(&quiet.stderr), "");
    let mut by_variable = launch(&["--config_file", "run.yaml", "-q"], &files, script);
    by_variable.command.env("SCONCE_TIMEOUT", "7");
    assert_eq!(text(&by_variable.output().stdout), "cpu 7\n");
}

#[test]
fn a_quiet_launcher_leaves_failures_to_the_exit_code() {
    let output = Launch::new(&["-q", "-n", "2"], "exit 3").output();
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(3), ""));
}

#[test]
fn machines_are_those_of_the_file_unless_the_environment_tells_of_them() {
    let config = "num_processes: 4\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: 127.0.0.1\nsame_network: true\n\
                  sconce_config: {max_restarts: 2, role: mine, monitor_interval: 0.5}\n";
    let dry = |variables: &[(&str, &str)]| {
        let flags = ["--config_file", "run.yaml", "--dry_run"];
        let mut launch = launch(&flags, &[("run.yaml", config)], "true");
        launch.command.envs(variables.iter().copied());
        let output = launch.output();
        assert!(output.status.success(), "{output:?}");
        text(&output.stdout)
    };
    let of_file = dry(&[]);
    for line in [
        "GROUP_RANK=1 ",
        "GROUP_WORLD_SIZE=2 ",
        "ROLE_NAME=mine ",
        "TORCHELASTIC_MAX_RESTARTS=2 ",
        "RANK=3 ",
    ] {
        assert!(of_file.contains(line), "{line} in {of_file}");
    }
    assert!(dry(&[("PET_NODE_RANK", "0")]).contains(" GROUP_RANK=0 "));
    // An operator's variables count for all that tells of machines.
    let of_operator = dry(&[
        ("PET_NNODES", "4"),
        ("PET_NODE_RANK", "2"),
        ("PET_MASTER_ADDR", "127.0.0.1"),
    ]);
    assert!(
        of_operator.contains(" GROUP_RANK=2 ") && of_operator.contains(" WORLD_SIZE=4 "),
        "{of_operator}"
    );
    // One machine in a file, as all of Accelerate's have it, does not say that there are no others.
    assert!(of_operator.contains("GROUP_WORLD_SIZE=4"), "{of_operator}");
}
