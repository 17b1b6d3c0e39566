//! `sconce test` and `sconce bench`: ranks that are the command itself.

use std::process::{Command, Output};

use sconce_core::self_test::checks;
use serde_json::Value;

fn sconce(words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command
        .args(words)
        .env("HF_HOME", env!("CARGO_TARGET_TMPDIR"))
        .env("RAYON_NUM_THREADS", "1");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SCONCE_") || name.starts_with("ACCELERATE_"))
    {
        command.env_remove(name);
    }
    command.output().unwrap()
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn all_checks_pass_on_two_ranks_and_are_listed() {
    let found = json(&sconce(&["test", "-n", "2", "--json"]));
    assert_eq!(found["passed"], true, "{found}");
    let names = Vec::from_iter(
        found["checks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|check| check["name"].as_str().unwrap()),
    );
    assert_eq!(names, Vec::from_iter(checks().iter().map(|check| check.name)));
    assert_eq!(found["ended_in"], Value::Null);
}

#[test]
fn the_table_ends_with_the_verdict() {
    let output = sconce(&["test", "-n", "1"]);
    let shown = String::from_utf8_lossy(&output.stdout);
    println!("{shown}");
    assert!(output.status.success(), "{output:?}");
    assert!(shown.contains("zero 3") && shown.contains("passed"), "{shown}");
    assert!(
        shown.contains(&format!("all {} checks passed", checks().len())),
        "{shown}"
    );
}

#[test]
fn the_configured_world_is_the_one_that_is_tested() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("run.yaml");
    std::fs::write(
        &file,
        "num_processes: 3\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n",
    )
    .unwrap();
    let found = json(&sconce(&["test", "--config_file", file.to_str().unwrap(), "--json"]));
    let detail = found["checks"][0]["detail"].as_str().unwrap();
    assert!(detail.contains("3 ranks") && detail.contains("FullShard"), "{detail}");
    let output = sconce(&["test", "-n", "2", "--", "--backend", "unknown"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

#[test]
fn ranks_that_cannot_begin_are_a_failed_test() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command
        .args(["test", "-n", "2", "--json"])
        .env("SCONCE_TIMEOUT", "soon");
    command.env("HF_HOME", env!("CARGO_TARGET_TMPDIR"));
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&found["passed"], &found["ended_in"]),
        (&Value::from(false), &Value::from("state"))
    );
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("SCONCE_TIMEOUT"),
        "{output:?}"
    );
}

#[test]
fn every_subject_is_measured() {
    let found = json(&sconce(&[
        "bench", "--json", "-n", "2", "--rounds", "1", "--size", "1MiB",
    ]));
    let rows = |subject: &str| found[subject]["rows"].as_array().unwrap().clone();
    let all_reduce = rows("collectives")
        .into_iter()
        .filter(|row| row["operation"] == "all_reduce");
    assert!(all_reduce.count() >= 3, "{found}");
    let strategies = Vec::from_iter(
        rows("step")
            .into_iter()
            .map(|row| row["strategy"].as_str().unwrap().to_owned()),
    );
    let expected = [
        "data_parallel",
        "zero_1",
        "zero_2",
        "zero_3",
        "full_shard",
        "shard_grad_op",
    ];
    assert_eq!(strategies, expected);
    for row in [rows("collectives"), rows("step"), rows("checkpoint")].concat() {
        assert!(row["seconds"].as_f64() > Some(0.0), "{row}");
    }
    let parts = Vec::from_iter(
        rows("checkpoint")
            .into_iter()
            .map(|row| row["what"].as_str().unwrap().to_owned()),
    );
    assert_eq!(parts, ["disk_write", "save", "disk_read", "load", "memcpy", "blocking"]);
}

#[test]
fn one_subject_is_a_table() {
    let output = sconce(&["bench", "collectives", "-n", "2", "--rounds", "1", "--size", "1MiB"]);
    let shown = String::from_utf8_lossy(&output.stdout);
    println!("{shown}");
    assert!(
        shown.starts_with("collectives, 2 ranks") && shown.contains("GB/s"),
        "{shown}"
    );
    assert!(!shown.contains("checkpoint"), "{shown}");
    let output = sconce(&["bench", "step", "--size", "1KiB"]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}
