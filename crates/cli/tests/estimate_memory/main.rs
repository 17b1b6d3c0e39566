//! `sconce estimate-memory` and `sconce plan` as their users see them.

mod plan;

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

/// Llama 2 with 7 billion parameters.
fn llama_2_7b() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096,
    })
}

/// A folder with the configuration of a model.
struct Model {
    folder: TempDir,
}

impl Model {
    fn new(config: &Value) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs `sconce SUBCOMMAND FOLDER WORDS...`.
    fn run(&self, subcommand: &str, words: &[&str]) -> Output {
        sconce(subcommand).arg(self.folder.path()).args(words).output().unwrap()
    }
}

/// `sconce SUBCOMMAND`, for which there is no configuration of the user's.
fn sconce(subcommand: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command.arg(subcommand).env("HF_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn error_of(output: &Output, code: i32) -> String {
    assert_eq!(output.status.code(), Some(code), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn tables_show_accelerates_figures_and_every_strategy() {
    let shown = text(&Model::new(&llama_2_7b()).run("estimate-memory", &["-n", "8", "--mixed_precision", "bf16"]));
    println!("{shown}");
    for words in [
        "llama, 6738415616 parameters",
        "Largest Layer",
        // 6 738 415 616 x 4 bytes, and a decoder layer of 202 383 360.
        "25.10 GB",
        "772.03 MB",
        "100.41 GB",
        "N/A",
        "data_parallel",
        "zero_1",
        "zero_2",
        "zero_3",
        "full_shard",
        "shard_grad_op",
        "2048 tokens",
    ] {
        assert!(shown.contains(words), "{words} in\n{shown}");
    }
}

#[test]
fn json_has_bytes_and_the_recommendation() {
    let model = Model::new(&llama_2_7b());
    let words = [
        "--json",
        "-n",
        "8",
        "--mixed-precision",
        "bf16",
        "--device",
        "cuda",
        "--memory",
        "24GiB",
        "--host-memory",
        "1TiB",
        "--sequence_length",
        "512",
    ];
    let found: Value = serde_json::from_str(&text(&model.run("estimate-memory", &words))).unwrap();
    assert_eq!(found["parameters"], 6_738_415_616u64);
    assert_eq!(found["sequence_length"], 512);
    let whole = &found["estimates"][0];
    assert_eq!(whole["strategy"], "data_parallel");
    assert_eq!(whole["bytes_of_rank"]["parameters"], 2 * 6_738_415_616u64);
    assert_eq!(whole["bytes_of_rank"]["masters"], 4 * 6_738_415_616u64);
    let recommended = &found["recommended"];
    let peak = recommended["bytes_of_rank"]["peak"].as_u64().unwrap();
    assert!(peak <= 24 << 30, "{recommended}");
    let estimates = found["estimates"].as_array().unwrap();
    let place = estimates.iter().position(|estimate| estimate == recommended).unwrap();
    for cheaper in &estimates[..place] {
        assert!(
            cheaper["bytes_of_rank"]["peak"].as_u64().unwrap() > 24 << 30,
            "{cheaper}"
        );
    }
    assert_eq!(found["dtypes"][3]["training_using_adam"], Value::Null);
}

#[test]
fn one_strategy_with_what_it_offloads_can_be_asked_for() {
    let model = Model::new(&llama_2_7b());
    let words = [
        "--json",
        "-n",
        "2",
        "--strategy",
        "zero_3,zero_2",
        "--offload_optimizer",
        "cpu",
        "--device",
        "cuda",
    ];
    let found: Value = serde_json::from_str(&text(&model.run("estimate-memory", &words))).unwrap();
    let estimates = found["estimates"].as_array().unwrap();
    let names = Vec::from_iter(estimates.iter().map(|estimate| estimate["strategy"].as_str().unwrap()));
    assert_eq!(names, ["zero_3", "zero_2"]);
    assert!(
        estimates
            .iter()
            .all(|estimate| estimate["bytes_of_rank"]["host"].as_u64() > Some(1 << 30))
    );
    assert_eq!(found["recommended"], Value::Null);
}

#[test]
fn the_run_of_a_deepspeed_configuration_can_be_asked_for() {
    let model = Model::new(&llama_2_7b());
    let file = model.path("zero.json");
    let config = json!({
        "zero_optimization": { "stage": 2, "reduce_bucket_size": 1_000_000_000 }, "bf16": { "enabled": true },
    });
    fs::write(&file, config.to_string()).unwrap();
    let words = ["--json", "-n", "4", "--deepspeed_config_file", file.to_str().unwrap()];
    let found: Value = serde_json::from_str(&text(&model.run("estimate-memory", &words))).unwrap();
    let estimate = &found["estimates"][0];
    assert_eq!(
        (&estimate["strategy"], found["estimates"].as_array().unwrap().len()),
        (&json!("zero_2"), 1)
    );
    // Three buckets of a billion elements of f32 and more, and values of 16 bits.
    assert!(
        estimate["bytes_of_rank"]["buffers"].as_u64() > Some(12_000_000_000),
        "{estimate}"
    );
    assert_eq!(estimate["bytes_of_rank"]["parameters"], 2 * 6_738_415_616u64);
}

#[test]
fn one_row_of_accelerates_table_can_be_asked_for() {
    let shown = text(&Model::new(&llama_2_7b()).run("estimate-memory", &["--dtypes", "float16"]));
    assert!(shown.contains("float16") && !shown.contains("int8"), "{shown}");
}

#[test]
fn what_is_no_model_is_an_error_in_words() {
    let unknown = Model::new(&json!({ "model_type": "mamba" }));
    let error = error_of(&unknown.run("estimate-memory", &[]), 1);
    assert!(error.contains("\"mamba\"; supported are `model_type` llama"), "{error}");

    let error = error_of(&sconce("estimate-memory").arg("nowhere").output().unwrap(), 1);
    assert!(error.contains("nowhere: there is no such file or folder"), "{error}");

    let damaged = unknown.path("model.safetensors");
    fs::write(&damaged, [9, 0, 0, 0, 0, 0, 0, 0, b'{', b'"']).unwrap();
    let error = error_of(&sconce("estimate-memory").arg(&damaged).output().unwrap(), 1);
    assert!(error.contains("model.safetensors"), "{error}");
}

#[test]
fn what_cannot_be_is_a_usage_error() {
    let model = Model::new(&llama_2_7b());
    for (words, expected) in [
        (&["-n", "3", "--num_machines", "2"][..], "cannot be spread evenly"),
        (&["--memory", "lots"], "is no size"),
        (&["--offload_params", "cpu"], "--strategy"),
        (
            &["--strategy", "zero_2", "--offload_params", "cpu"],
            "offloaded only where they are sharded",
        ),
        (&["-n", "0"], "at least 1"),
    ] {
        let error = error_of(&model.run("estimate-memory", words), 2);
        assert!(error.contains(expected), "{words:?}: {error}");
    }
}
