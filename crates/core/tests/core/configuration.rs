//! Configuration files: every kind that Accelerate has written, DeepSpeed's, our own, and what is wrong in them.

use sconce_core::config::{Configuration, ConfigurationError, Format, Paradigm, SETTINGS, Value, setting};
use std::path::{Path, PathBuf};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/configurations")
        .join(name)
}

fn yaml(text: &str) -> Result<Configuration, ConfigurationError> {
    Configuration::parse(text, "run.yaml", Format::Yaml)
}

#[track_caller]
fn value(configuration: &Configuration, path: &str) -> String {
    assert!(setting(path).is_some(), "{path} is no setting");
    configuration.value(path).map_or_else(|| "-".into(), Value::to_string)
}

/// Fails unless the text is refused with all `parts` in its message.
#[track_caller]
fn assert_refused(text: &str, parts: &[&str]) {
    let error = yaml(text).expect_err(text).to_string();
    assert!(error.starts_with("run.yaml"), "{error}");
    for part in parts {
        assert!(error.contains(part), "{part:?} in {error:?}");
    }
}

#[test]
fn files_of_every_version_of_accelerate_load() {
    // File, and what it must give; the files have the peculiarities of Accelerate's tests/test_configs.
    type Values<'v> = &'v [(&'v str, &'v str)];
    let files: [(&str, Values<'_>, usize); 7] = [
        (
            "0_11_0.yaml",
            &[
                ("distributed_type", "NO"),
                ("mixed_precision", "no"),
                ("main_process_ip", "-"),
            ],
            0,
        ),
        ("0_12_0.yaml", &[("distributed_type", "NO"), ("num_processes", "1")], 0),
        (
            "0_28_0_mpi.yaml",
            &[
                ("distributed_type", "MULTI_CPU"),
                ("mpirun_config.mpirun_hostfile", "shared/hostfile"),
                ("num_machines", "4"),
                ("num_processes", "16"),
                ("use_cpu", "true"),
            ],
            // IPEX.
            1,
        ),
        (
            "0_34_0_fp8.yaml",
            &[
                ("mixed_precision", "fp8"),
                ("fp8_config.fp8_format", "E4M3"),
                ("fp8_config.amax_history_len", "1024"),
                ("fp8_config.amax_compute_algo", "max"),
                ("fp8_config.margin", "0"),
            ],
            // Transformer Engine.
            1,
        ),
        ("latest.yaml", &[("gpu_ids", "all"), ("same_network", "true")], 0),
        (
            "latest_fsdp.yaml",
            &[
                ("distributed_type", "FSDP"),
                ("fsdp_config.fsdp_ignored_modules", "-"),
                ("fsdp_config.fsdp_sharding_strategy", "FULL_SHARD"),
                ("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "BertLayer"),
            ],
            0,
        ),
        (
            "validate_launch_cmd.yaml",
            &[
                ("debug", "true"),
                ("num_processes", "1"),
                ("fsdp_config.fsdp_sync_module_states", "false"),
                ("deepspeed_config.deepspeed_config_file", "path/to/be/ignored"),
            ],
            0,
        ),
    ];
    for (name, expected, warnings) in files {
        let configuration = Configuration::read(&fixture(name)).unwrap_or_else(|error| panic!("{error}"));
        for (path, text) in expected {
            assert_eq!(&value(&configuration, path), text, "{path} of {name}");
        }
        let warned = configuration.warnings();
        assert_eq!(warned.len(), warnings, "{name}: {warned:?}");
    }
}

#[test]
fn sagemaker_is_refused_by_name_and_unknown_keys_with_the_nearest() {
    let error = Configuration::read(&fixture("0_30_0_sagemaker.yaml"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("AMAZON_SAGEMAKER") && error.contains(":3: `compute_environment`"),
        "{error}"
    );
    let error = Configuration::read(&fixture("invalid_keys.yaml"))
        .unwrap_err()
        .to_string();
    assert!(error.contains(":3: `another_invalid_key`: unknown key"), "{error}");
}

#[test]
fn the_two_files_with_deepspeeds_keys_inside_load_as_they_stand() {
    for (name, precision, steps) in [
        ("deepspeed_inline_bf16.yaml", "bf16", 8),
        ("deepspeed_inline_fp16.yaml", "fp16", 1),
    ] {
        let configuration = Configuration::read(&fixture(name)).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(configuration.paradigm().unwrap(), Paradigm::DeepSpeed);
        assert_eq!(value(&configuration, "mixed_precision"), precision);
        assert_eq!(value(&configuration, "gpu_ids"), "0,1,2,3,4,5,6,7");
        assert_eq!(value(&configuration, "num_processes"), "8");
        let Some(Value::DeepSpeed(json)) = configuration.value("deepspeed_config.deepspeed_config_file") else {
            panic!("{configuration:?}");
        };
        let keys: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!(keys["gradient_accumulation_steps"], steps);
        assert_eq!(keys["zero_optimization"]["stage"], 3);
        assert_eq!(keys["zero_optimization"]["reduce_bucket_size"], 5e8);
        assert!(
            keys.get("zero3_init_flag").is_none(),
            "Accelerate's key is not DeepSpeed's"
        );
        let warned: Vec<_> = configuration.warnings().iter().map(ToString::to_string).collect();
        for key in [
            "offload_optimizer_params",
            "offload_param_device",
            "stage3_max_act_zero_gap",
        ] {
            let of_key = warned
                .iter()
                .filter(|warning| warning.contains(&format!("zero_optimization.{key}`")));
            assert_eq!(of_key.count(), 1, "{key}: {warned:#?}");
        }
    }
}

/// Else the file would mean something else once it has been written again, without its nulls.
#[test]
fn a_null_makes_no_section_deepspeeds() {
    let section = "deepspeed_config:\n  gradient_accumulation_steps: 3\n  bf16: {enabled: true}\n";
    let inline = yaml(section).unwrap();
    assert_eq!(inline.value("sconce_config.gradient_accumulation_steps"), None);
    let error = yaml(&section.replace("{enabled: true}", "null")).unwrap_err();
    assert!(error.to_string().contains("`deepspeed_config.bf16`"), "{error}");
}

#[test]
fn errors_inside_deepspeeds_keys_name_the_file_and_the_key() {
    assert_refused(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_optimization: {stage: 3, stag3_x: 1}\n",
        &["run.yaml:2: `deepspeed_config`", "zero_optimization.stag3_x"],
    );
}

#[test]
fn a_deepspeed_configuration_loads_in_place_of_accelerates() {
    let text = r#"{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, /* a comment */ }"#;
    let folder = tempfile::tempdir().unwrap();
    // JSON under a .yaml name is JSON.
    let file = folder.path().join("ds_config.yaml");
    std::fs::write(&file, text).unwrap();
    let configuration = Configuration::read(&file).unwrap();
    assert_eq!(configuration.paradigm().unwrap(), Paradigm::DeepSpeed);
    assert_eq!(
        value(&configuration, "deepspeed_config.deepspeed_config_file"),
        file.display().to_string()
    );
    // In YAML's own form, which DeepSpeed cannot read, its content is passed on.
    let configuration = yaml("zero_optimization:\n  stage: 2\nbf16: {enabled: yes}\n");
    let error = configuration.unwrap_err().to_string();
    assert!(
        error.contains("`bf16.enabled`: found \"yes\", expected true or false"),
        "{error}"
    );
    let configuration = yaml("zero_optimization:\n  stage: 2\nbf16: {enabled: true}\n").unwrap();
    assert!(matches!(
        configuration.value("deepspeed_config.deepspeed_config_file"),
        Some(Value::DeepSpeed(_))
    ));
}

#[test]
fn old_keys_and_json_under_a_yaml_name_are_read() {
    let configuration =
        yaml("{\n  \"distributed_type\": \"NO\",\n  \"fp16\": true,\n  \"dynamo_backend\": \"NO\"\n}\n").unwrap();
    assert_eq!(value(&configuration, "mixed_precision"), "fp16");
    assert_eq!(configuration.warnings(), []);
    let configuration = yaml("dynamo_backend: INDUCTOR\n").unwrap();
    assert!(
        configuration.warnings()[0]
            .to_string()
            .contains("run.yaml:1: `dynamo_backend`: has no effect")
    );
    assert_refused(
        "fp16: true\nmixed_precision: bf16\n",
        &["run.yaml:1: `fp16`", "run.yaml:2: `mixed_precision`"],
    );
    // Without the prefix, as Accelerate reads it, and from before it had one.
    let configuration =
        yaml("fsdp_config:\n  sharding_strategy: 2\n  fsdp_backward_prefetch_policy: backward_pre\n").unwrap();
    assert_eq!(value(&configuration, "fsdp_config.fsdp_sharding_strategy"), "2");
    assert_eq!(
        value(&configuration, "fsdp_config.fsdp_backward_prefetch"),
        "BACKWARD_PRE"
    );
    assert_eq!(configuration.paradigm().unwrap(), Paradigm::Fsdp);
}

#[test]
fn values_have_types_however_they_are_quoted() {
    let text = "mixed_precision: no\ndebug: 'False'\nuse_cpu: on\nnum_processes: '4'\nmain_process_port: 29500\n\
                fsdp_config:\n  fsdp_offload_params: \"True\"\n  fsdp_min_num_params: 1e6\n  \
                fsdp_transformer_layer_cls_to_wrap: [A, B]\n";
    let configuration = yaml(text).unwrap();
    for (path, expected) in [
        ("mixed_precision", "no"),
        ("debug", "false"),
        ("use_cpu", "true"),
        ("num_processes", "4"),
        ("main_process_port", "29500"),
        ("fsdp_config.fsdp_offload_params", "true"),
        ("fsdp_config.fsdp_min_num_params", "1000000"),
        ("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "A,B"),
    ] {
        assert_eq!(value(&configuration, path), expected, "{path}");
    }
    assert_eq!(
        value(&yaml("mixed_precision: false\n").unwrap(), "mixed_precision"),
        "no"
    );
}

#[test]
fn what_cannot_be_is_refused_with_file_line_and_key() {
    assert_refused(
        "num_processes: -1\n",
        &["run.yaml:1: `num_processes`", "found -1", "a whole number from 1"],
    );
    assert_refused("debug: maybe\n", &["`debug`", "\"maybe\"", "true or false"]);
    assert_refused(
        "mixed_precision: int3\n",
        &["`mixed_precision`", "no, fp16, bf16 or fp8"],
    );
    assert_refused(
        "\n# a comment\nnum_procesess: 2\n",
        &["run.yaml:3: `num_procesess`", "nearest known is `num_processes`"],
    );
    assert_refused(
        "fsdp_config:\n  fsdp_verson: 2\n",
        &[
            "run.yaml:2: `fsdp_config.fsdp_verson`",
            "nearest known is `fsdp_version`",
        ],
    );
    assert_refused("fsdp_confg: {}\n", &["`fsdp_confg`", "nearest known is `fsdp_config`"]);
    assert_refused("fsdp_config: 3\n", &["`fsdp_config`", "keys with values"]);
    assert_refused("distributed_type: MEGATRON_LM\n", &["MEGATRON_LM is not supported"]);
    assert_refused("distributed_type: XLA\n", &["XLA is not supported", "TPU"]);
    assert_refused(
        "distributed_type: MULTI_NPU\n",
        &["MULTI_NPU is not supported", "MULTI_GPU"],
    );
    assert_refused("- 1\n- 2\n", &["keys with values"]);
    assert_refused("a: b: c\n", &["run.yaml:1:", "expected YAML"]);
    let both = "fsdp_config: {fsdp_version: 2}\ndeepspeed_config: {zero_stage: 2}\n";
    let error = yaml(both).unwrap().paradigm().unwrap_err().to_string();
    assert!(
        error.contains("run.yaml:1") && error.contains("run.yaml:2") && error.contains("distributed_type"),
        "{error}"
    );
}

#[test]
fn a_key_that_is_given_twice_counts_as_it_stands_last_with_a_warning() {
    let configuration = yaml("num_processes: 2\ndebug: true\nnum_processes: 3\n").unwrap();
    assert_eq!(value(&configuration, "num_processes"), "3");
    let warned = configuration.warnings();
    assert!(
        warned.len() == 1 && warned[0].to_string().contains("`num_processes` is given twice"),
        "{warned:?}"
    );
}

#[test]
fn keys_without_effect_are_warned_of_only_where_they_ask_for_something() {
    let idle = "tpu_name: null\ntpu_env: []\ndowncast_bf16: 'no'\nmain_training_function: main\nmegatron_lm_config: {}\n\
                dynamo_config: {dynamo_backend: NO, dynamo_mode: default}\ntpu_use_sudo: false\n";
    assert_eq!(yaml(idle).unwrap().warnings(), []);
    let asking = "tpu_name: mine\ndowncast_bf16: yes\ndynamo_config: {backend: inductor}\n\
                  megatron_lm_config: {megatron_lm_tp_degree: 2}\ndeepspeed_config: {deepspeed_hostfile: hosts}\n";
    let configuration = yaml(asking).unwrap();
    assert_eq!(configuration.warnings().len(), 5, "{:?}", configuration.warnings());
}

#[test]
fn toml_has_the_same_keys_and_lines() {
    let text = "# mine\nmixed_precision = \"bf16\"\nnum_processes = 4\n\n[fsdp_config]\nfsdp_version = 2\n[sconce_config]\nbackend = \"mpi\"\n";
    let configuration = Configuration::parse(text, "run.toml", Format::Toml).unwrap();
    let version = configuration.get("fsdp_config.fsdp_version").unwrap();
    assert_eq!(version.origin.to_string(), "run.toml:6: `fsdp_config.fsdp_version`");
    assert_eq!(value(&configuration, "sconce_config.backend"), "mpi");
    let error = Configuration::parse("a = \n", "run.toml", Format::Toml)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("run.toml:1:") && error.contains("expected TOML"),
        "{error}"
    );
}

#[test]
fn a_later_file_wins_over_an_earlier_one_key_by_key() {
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("a.yaml"), folder.path().join("b.toml"));
    std::fs::write(
        &first,
        "num_processes: 2\nmixed_precision: fp16\nfsdp_config: {fsdp_version: 1, fsdp_offload_params: true}\n",
    )
    .unwrap();
    std::fs::write(&second, "mixed_precision = 'bf16'\nfsdp_config.fsdp_version = 2\n").unwrap();
    let configuration = Configuration::read_all([first.as_path(), second.as_path()]).unwrap();
    for (path, expected, file) in [
        ("num_processes", "2", "a.yaml"),
        ("mixed_precision", "bf16", "b.toml"),
        ("fsdp_config.fsdp_version", "2", "b.toml"),
        ("fsdp_config.fsdp_offload_params", "true", "a.yaml"),
    ] {
        assert_eq!(value(&configuration, path), expected, "{path}");
        let origin = configuration.get(path).unwrap().origin.to_string();
        assert!(origin.contains(file), "{path}: {origin}");
    }
}

#[test]
fn files_that_are_no_configurations_give_one_clear_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.yaml");
    let refused = |content: &[u8], expected: &str| {
        std::fs::write(&file, content).unwrap();
        let error = Configuration::read(&file).expect_err(expected).to_string();
        assert!(error.contains("run.yaml") && error.contains(expected), "{error}");
        assert!(error.lines().count() == 1, "{error}");
    };
    refused(&[0xff, 0xfe, b'a'], "utf-8");
    refused(&vec![b'#'; (1 << 20) + 1], "more than 1048576 bytes");
    // A billion laughs: nine lists of nine aliases each.
    let mut laughs = String::from("a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n");
    for level in 1..9 {
        let alias = format!("*a{}, ", level - 1).repeat(9);
        laughs += &format!("a{level}: &a{level} [{}]\n", alias.trim_end_matches(", "));
    }
    refused(laughs.as_bytes(), "expected YAML");
    let deep = format!("a: {}{}", "[".repeat(5_000), "]".repeat(5_000));
    refused(deep.as_bytes(), "expected YAML");
    let deep_json = format!("{{\"a\": {}{}}}", "[".repeat(5_000), "]".repeat(5_000));
    refused(deep_json.as_bytes(), "expected");
    let missing = Configuration::read(&folder.path().join("none.yaml"))
        .unwrap_err()
        .to_string();
    assert!(missing.contains("none.yaml: cannot be read"), "{missing}");
    let error = Configuration::read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("cannot be read"), "{error}");
    std::fs::write(&file, "").unwrap();
    assert!(Configuration::read(&file).unwrap().is_empty());
}

#[test]
fn what_is_written_is_read_back_in_every_format() {
    for name in [
        "latest_fsdp.yaml",
        "0_34_0_fp8.yaml",
        "deepspeed_inline_bf16.yaml",
        "deepspeed_inline_fp16.yaml",
        "0_28_0_mpi.yaml",
    ] {
        let original = Configuration::read(&fixture(name)).unwrap();
        for ending in ["yaml", "json", "toml"] {
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("new/run").with_extension(ending);
            original.write(&file, &|setting| Some(setting.about.into())).unwrap();
            let again = Configuration::read(&file).unwrap_or_else(|error| panic!("{error}"));
            let values = |configuration: &Configuration| {
                Vec::from_iter(
                    configuration
                        .iter()
                        .map(|(setting, given)| (setting.path, given.value.to_json())),
                )
            };
            assert_eq!(values(&again), values(&original), "{name} as {ending}");
            assert_eq!(
                std::fs::read_dir(file.parent().unwrap()).unwrap().count(),
                1,
                "nothing else is left"
            );
        }
    }
}

#[test]
fn texts_that_yaml_might_take_for_something_else_are_quoted() {
    let mut configuration = Configuration::new();
    for (path, text) in [
        ("mixed_precision", "no"),
        ("distributed_type", "NO"),
        ("main_process_ip", "10.0.0.1"),
        ("sconce_config.tee", "0:1,1:3"),
        ("sconce_config.role", "a: b # c"),
    ] {
        configuration.set(path, text).unwrap();
    }
    let text = configuration.to_text(Format::Yaml, &|_| None);
    for line in [
        "mixed_precision: \"no\"",
        "distributed_type: \"NO\"",
        "main_process_ip: \"10.0.0.1\"",
        "  role: \"a: b # c\"",
    ] {
        assert!(text.contains(&format!("{line}\n")), "{text}");
    }
    assert_eq!(value(&yaml(&text).unwrap(), "sconce_config.role"), "a: b # c");
}

#[test]
fn every_setting_has_one_key_and_a_default_that_is_a_value_of_it() {
    let mut paths = std::collections::BTreeSet::new();
    for setting in SETTINGS {
        assert!(
            [setting.path]
                .iter()
                .chain(setting.aliases)
                .all(|path| paths.insert(*path)),
            "{}",
            setting.path
        );
        if let Some(default) = setting.default {
            Configuration::new().set(setting.path, default).unwrap();
        }
    }
    let error = Configuration::new().set("num_proceses", "1").unwrap_err().to_string();
    assert!(error.contains("`num_processes`"), "{error}");
}
