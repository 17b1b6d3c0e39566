//! Training over MPI is training over shared memory, to the bit.

use crate::{finetune_llama, sconce, text};
use std::path::Path;
use std::process::Command;

/// The launcher's flags for ways to shard.
const STRATEGIES: [&[&str]; 3] = [
    &[],
    &["--use_deepspeed", "--zero_stage", "3"],
    &["--use_fsdp", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"],
];

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn every_strategy_trains_to_the_same_bits_over_mpi_and_shared_memory() {
    let folder = tempfile::tempdir().unwrap();
    for ranks in [2, 4] {
        for (number, strategy) in STRATEGIES.into_iter().enumerate() {
            let [shm, mpi] = ["shm", "mpi"].map(|backend| {
                let output = folder.path().join(format!("{backend}-{ranks}-{number}"));
                train(backend, ranks, strategy, &output)
            });
            assert!(shm == mpi, "{strategy:?} on {ranks} ranks");
        }
    }
}

/// Trains the shipped model; returns its weights' file and the metrics but for the speeds.
fn train(backend: &str, ranks: usize, strategy: &[&str], output: &Path) -> (Vec<u8>, Vec<String>) {
    let metrics = output.with_extension("jsonl");
    let mut command = Command::new(sconce());
    command.args(["launch", "--backend", backend, "-n", &ranks.to_string()]);
    command
        .args(strategy)
        .arg(finetune_llama())
        .args(["--steps", "6", "--lr", "1e-2"]);
    command
        .arg("--output_dir")
        .arg(output)
        .arg("--metrics_out")
        .arg(&metrics);
    // Open MPI's own switch for root.
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    let trained = command.output().expect("sconce runs");
    assert!(
        trained.status.success(),
        "{}{}",
        text(&trained.stdout),
        text(&trained.stderr)
    );
    let lines = std::fs::read_to_string(metrics).unwrap();
    let numbers = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        format!("{} {} {}", line["step"], line["loss"], line["grad_norm"])
    };
    let numbers: Vec<String> = lines.lines().map(numbers).collect();
    assert_eq!(numbers.len(), 6, "{lines}");
    (std::fs::read(output.join("model.safetensors")).unwrap(), numbers)
}
