//! `sconce config` and `sconce to-fsdp2` as their users see them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value as Json;
use tempfile::TempDir;

fn sconce(folder: &TempDir, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command
        .args(words)
        .current_dir(folder)
        .env("HF_HOME", folder.path().join("home"));
    let of_settings = |name: &str| {
        ["ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "SCONCE_"]
            .iter()
            .any(|start| name.starts_with(start))
    };
    for (name, _) in std::env::vars().filter(|(name, _)| of_settings(name)) {
        command.env_remove(name);
    }
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[track_caller]
fn printed(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    text(&output.stdout)
}

fn folder_with(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

fn core_fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../core/tests/fixtures/configurations")
        .join(name)
}

#[test]
fn explain_tells_who_gave_each_value() {
    let folder = folder_with(&[
        (
            "a.yaml",
            "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 1\n  fsdp_offload_params: true\n",
        ),
        (
            "b.toml",
            "fsdp_config.fsdp_version = 2\n[deepspeed_config]\nzero_stage = 1\n",
        ),
    ]);
    let words = [
        "config",
        "show",
        "--explain",
        "--config_file",
        "a.yaml",
        "--config_file",
        "b.toml",
        "--",
        "-n",
        "2",
    ];
    let mut command = sconce(&folder, &words);
    command.env("FSDP_OFFLOAD_PARAMS", "false");
    let shown = printed(&command.output().unwrap());
    let row = |path: &str| {
        let row = shown.lines().find(|line| line.split(' ').next() == Some(path));
        row.unwrap_or_else(|| panic!("{path} in {shown}"))
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    for expected in [
        "num_processes 2 --num_processes",
        "distributed_type FSDP a.yaml:1: `distributed_type`",
        "fsdp_config.fsdp_version 2 b.toml:1: `fsdp_config.fsdp_version`",
        "fsdp_config.fsdp_offload_params false FSDP_OFFLOAD_PARAMS",
        "mixed_precision no default",
        "gpu_ids - nobody says it",
        "deepspeed_config.zero_stage 1 b.toml:3: `deepspeed_config.zero_stage`, without effect beside FSDP",
    ] {
        assert_eq!(row(expected.split(' ').next().unwrap()), expected);
    }
}

#[test]
fn accelerates_merge_of_flags_and_file_is_as_its_test_has_it() {
    // tests/test_cli.py: debug of the file, flags over the file's values, a key of a section over a default.
    let folder = tempfile::tempdir().unwrap();
    let file = core_fixture("validate_launch_cmd.yaml").display().to_string();
    let words = ["config", "show", "--json", "--config_file", &file, "--"];
    let flags = ["--num-processes", "2", "--deepspeed_config_file", "path/to/be/accepted"];
    let shown = printed(&sconce(&folder, &[&words[..], &flags].concat()).output().unwrap());
    let shown: Json = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["debug"], true);
    assert_eq!(shown["num_processes"], 2);
    assert_eq!(shown["fsdp_config.fsdp_sync_module_states"], false);
    assert_eq!(shown["deepspeed_config.deepspeed_config_file"], "path/to/be/accepted");
}

#[test]
fn what_is_shown_is_a_file_that_says_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let file = core_fixture("latest_fsdp.yaml").display().to_string();
    let first = printed(
        &sconce(&folder, &["config", "show", "--config_file", &file])
            .output()
            .unwrap(),
    );
    fs::write(folder.path().join("again.yaml"), &first).unwrap();
    let second = printed(
        &sconce(&folder, &["config", "show", "--config_file", "again.yaml"])
            .output()
            .unwrap(),
    );
    assert_eq!(first, second);
    assert!(
        first.contains("  fsdp_transformer_layer_cls_to_wrap: BertLayer\n"),
        "{first}"
    );
}

#[test]
fn validate_checks_what_launch_would_and_names_the_place() {
    let folder = folder_with(&[
        (
            "good.yaml",
            "distributed_type: DEEPSPEED\ntpu_name: mine\ndeepspeed_config: {zero_stage: 3}\n",
        ),
        (
            "bad.yaml",
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_forward_prefetch: true\n",
        ),
        ("worse.yaml", "num_proceses: 2\n"),
    ]);
    let output = sconce(&folder, &["config", "validate", "good.yaml"]).output().unwrap();
    assert_eq!(
        printed(&output),
        "good.yaml: valid\n  warning: good.yaml:2: `tpu_name`: has no effect here: candle does not run on TPUs\n"
    );
    let output = sconce(&folder, &["config", "validate", "good.yaml", "bad.yaml", "worse.yaml"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let (shown, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(
        shown.contains("bad.yaml: not valid\n") && shown.contains("worse.yaml: not valid\n"),
        "{shown}"
    );
    assert!(
        errors.contains("hint: --fsdp_forward_prefetch is from bad.yaml:4"),
        "{errors}"
    );
    assert!(errors.contains("worse.yaml:1: `num_proceses`: unknown key"), "{errors}");
    let output = sconce(&folder, &["config", "validate"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn default_writes_what_accelerate_writes_but_for_tpus_and_overwrites_nothing() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/launch/fixtures/config_default.json");
    let fixture: Json = serde_json::from_str(&fs::read_to_string(fixture).unwrap()).unwrap();
    for precision in ["no", "fp16", "bf16"] {
        let folder = tempfile::tempdir().unwrap();
        let words = ["config", "default", "--mixed_precision", precision];
        printed(&sconce(&folder, &words).output().unwrap());
        let file = folder.path().join("home/accelerate/default_config.yaml");
        assert!(file.is_file(), "Accelerate's default path");
        let shown = printed(&sconce(&folder, &["config", "show", "--json"]).output().unwrap());
        let written: Json = serde_json::from_str(&shown).unwrap();
        let recorded = fixture["yaml"][precision].as_str().unwrap();
        let mut recorded: Json = serde_json::from_str(recorded).unwrap();
        // A machine with GPUs gets other numbers.
        if written["use_cpu"] == true {
            // Of TPUs; Accelerate fills them in.
            for key in [
                "downcast_bf16",
                "main_training_function",
                "tpu_use_cluster",
                "tpu_use_sudo",
            ] {
                recorded.as_object_mut().unwrap().remove(key).unwrap();
            }
            assert_eq!(written, recorded);
        }
        let again = sconce(&folder, &words).output().unwrap();
        assert_eq!(again.status.code(), Some(1), "{again:?}");
        assert!(text(&again.stderr).contains("is there already"), "{again:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let output = sconce(&folder, &["config", "default", "--mixed_precision", "fp8"])
        .output()
        .unwrap();
    assert_eq!(
        output.status.code(),
        Some(2),
        "as Accelerate, which asks about fp8 in its dialogue only"
    );
}

#[test]
fn update_rewrites_old_keys_and_fills_in_what_is_left_out() {
    let folder = folder_with(&[(
        "old.yaml",
        "# mine\nfp16: true\ndynamo_backend: 'NO'\nfsdp_config: {sharding_strategy: 2}\n",
    )]);
    printed(
        &sconce(&folder, &["config", "update", "--config_file", "old.yaml"])
            .output()
            .unwrap(),
    );
    let updated = fs::read_to_string(folder.path().join("old.yaml")).unwrap();
    for line in [
        "distributed_type: FSDP",
        "mixed_precision: fp16",
        "num_machines: 1",
        "use_cpu: false",
        "  fsdp_sharding_strategy: 2",
    ] {
        assert!(updated.lines().any(|of| of == line), "{line} in {updated}");
    }
    assert!(!updated.contains("fp16: true"), "{updated}");
    let missing = sconce(&folder, &["config", "update"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(2));
    assert!(
        text(&missing.stderr).contains("default_config.yaml: cannot be read"),
        "{missing:?}"
    );
}

#[test]
fn the_schema_has_every_key_that_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let schema: Json =
        serde_json::from_str(&printed(&sconce(&folder, &["config", "schema"]).output().unwrap())).unwrap();
    assert_eq!(schema["additionalProperties"], false);
    let top = schema["properties"].as_object().unwrap();
    for entry in fs::read_dir(core_fixture("")).unwrap() {
        let file = entry.unwrap().path();
        let name = file.file_name().unwrap().to_str().unwrap();
        if ["invalid_keys.yaml", "0_30_0_sagemaker.yaml"].contains(&name) {
            continue;
        }
        let content = fs::read_to_string(&file).unwrap();
        let mut section = None;
        for line in content.lines().filter(|line| !line.trim_start().starts_with('#')) {
            let Some((key, _)) = line.split_once(':') else { continue };
            if !key.starts_with(' ') {
                section = top.get(key);
                assert!(section.is_some(), "{key} of {name}");
            } else if let Some(within) = section.filter(|_| key.starts_with("  ") && !key.starts_with("   ")) {
                let is_open = within["additionalProperties"] != false;
                assert!(
                    is_open || within["properties"].get(key.trim()).is_some(),
                    "{key} of {name}"
                );
            }
        }
    }
    assert_eq!(schema["properties"]["mixed_precision"]["enum"][2], "bf16");
    assert_eq!(schema["properties"]["num_processes"]["minimum"], 1);
}

#[test]
fn to_fsdp2_follows_accelerates_table() {
    // Strategy, and what becomes of it (accelerate, commands/to_fsdp2).
    for (strategy, reshards) in [
        ("FULL_SHARD", true),
        ("SHARD_GRAD_OP", false),
        ("HYBRID_SHARD", true),
        ("HYBRID_SHARD_ZERO2", false),
        ("NO_SHARD", false),
    ] {
        let config = fs::read_to_string(core_fixture("latest_fsdp.yaml")).unwrap();
        let folder = folder_with(&[("one.yaml", &config.replace("FULL_SHARD", strategy))]);
        let words = ["to-fsdp2", "--config_file", "one.yaml", "--output_file", "two.yaml"];
        let output = sconce(&folder, &words).output().unwrap();
        let notes = text(&output.stderr);
        assert!(output.status.success(), "{output:?}");
        assert!(
            notes.contains("fsdp_forward_prefetch is left out: version 2 does not have it yet"),
            "{notes}"
        );
        let shown = printed(
            &sconce(&folder, &["config", "show", "--json", "--config_file", "two.yaml"])
                .output()
                .unwrap(),
        );
        let shown: Json = serde_json::from_str(&shown).unwrap();
        assert_eq!(shown["fsdp_config.fsdp_version"], "2");
        assert_eq!(
            shown["fsdp_config.fsdp_reshard_after_forward"],
            reshards.to_string(),
            "{strategy}"
        );
        for gone in [
            "sharding_strategy",
            "backward_prefetch",
            "forward_prefetch",
            "sync_module_states",
            "use_orig_params",
        ] {
            assert!(shown.get(format!("fsdp_config.fsdp_{gone}")).is_none(), "{gone}");
        }
        assert_eq!(
            shown["fsdp_config.fsdp_transformer_layer_cls_to_wrap"], "BertLayer",
            "other keys stay"
        );
        // It is there now, and version 2 already.
        let again = sconce(&folder, &words).output().unwrap();
        assert_eq!(again.status.code(), Some(1), "{again:?}");
        let before = fs::read(folder.path().join("two.yaml")).unwrap();
        let twice = sconce(&folder, &["to-fsdp2", "--config_file", "two.yaml", "--overwrite"])
            .output()
            .unwrap();
        assert!(
            text(&twice.stderr).contains("version 2 already") && twice.status.success(),
            "{twice:?}"
        );
        assert_eq!(fs::read(folder.path().join("two.yaml")).unwrap(), before);
    }
    let folder = folder_with(&[
        ("zero.yaml", "distributed_type: DEEPSPEED\n"),
        ("one.yaml", "distributed_type: FSDP\n"),
    ]);
    for (words, message) in [
        (&["--config_file", "one.yaml"][..], "where to write the result?"),
        (
            &["--config_file", "none.yaml", "--overwrite"],
            "none.yaml: cannot be read",
        ),
        (
            &["--config_file", "zero.yaml", "--overwrite"],
            "expected a configuration for FSDP",
        ),
    ] {
        let output = sconce(&folder, &[&["to-fsdp2"], words].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(text(&output.stderr).contains(message), "{output:?}");
    }
}

#[test]
fn a_deepspeed_configuration_is_not_lost_by_an_update() {
    let configuration = r#"{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}"#;
    let folder = folder_with(&[("ds.json", configuration)]);
    let output = sconce(&folder, &["config", "update", "--config_file", "ds.json"])
        .output()
        .unwrap();
    assert!(!output.status.success());
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("ds.json") && stderr.contains("would be lost"),
        "{stderr}"
    );
    assert_eq!(
        fs::read_to_string(folder.path().join("ds.json")).unwrap(),
        configuration
    );
}

#[test]
fn explain_tells_what_a_deepspeed_configuration_decides() {
    let json = r#"{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}"#;
    let inline = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_optimization:\n    stage: 1\n  bf16:\n    enabled: true\n";
    let idle = "distributed_type: FSDP\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n";
    let folder = folder_with(&[("ds.json", json), ("inline.yaml", inline), ("idle.yaml", idle)]);
    let row_of = |file: &str, name: &str| {
        let output = sconce(&folder, &["config", "show", "--explain", "--config_file", file]).output();
        let printed = printed(&output.unwrap());
        printed.lines().find(|line| line.starts_with(name)).unwrap().to_owned()
    };
    for (file, decides) in [
        ("ds.json", "ds.json decides it"),
        ("inline.yaml", "DeepSpeed configuration decides it"),
    ] {
        for decided in ["mixed_precision", "deepspeed_config.zero_stage"] {
            let row = row_of(file, decided);
            assert!(row.contains(decides), "{file}: {row}");
        }
        let row = row_of(file, "num_machines");
        assert!(!row.contains("decides"), "{file}: {row}");
    }
    let row = row_of("idle.yaml", "mixed_precision");
    assert!(!row.contains("decides"), "FSDP shards: {row}");
}
