//! Training over MPI is training over shared memory, to the bit.

use crate::killed_rank::{parent_of, processes};
use crate::{finetune_llama, sconce, text};
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

/// The launcher's flags for ways to shard; on one host the hybrid strategy has one group.
const STRATEGIES: [&[&str]; 6] = [
    &[],
    &["--use_deepspeed", "--zero_stage", "1"],
    &["--use_deepspeed", "--zero_stage", "2"],
    &["--use_deepspeed", "--zero_stage", "3"],
    &["--use_fsdp", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"],
    HYBRID,
];

const HYBRID: &[&str] = &[
    "--use_fsdp",
    "--fsdp_sharding_strategy",
    "HYBRID_SHARD",
    "--fsdp_auto_wrap_policy",
    "TRANSFORMER_BASED_WRAP",
];

/// A program for each rank that says where it is, two ranks on a host, and becomes what follows.
const ON_HOSTS_OF_TWO: &str = "export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 \
     LOCAL_RANK=$((OMPI_COMM_WORLD_RANK % 2)) GROUP_RANK=$((OMPI_COMM_WORLD_RANK / 2)); exec \"$@\"";

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

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn groups_that_are_replicas_train_over_mpi_as_one_group_does() {
    let folder = tempfile::tempdir().unwrap();
    let one_group = train("mpi", 4, HYBRID, &folder.path().join("one"));
    let rank = ["/bin/sh", "-c", ON_HOSTS_OF_TWO, "rank"].map(OsString::from);
    let two_groups = train_as(&rank, "mpi", 4, HYBRID, &folder.path().join("two"));
    assert!(one_group.0 != two_groups.0, "sums in another order have other bits");
    for (one, two) in one_group.1.iter().zip(&two_groups.1) {
        let numbers = |line: &str| -> Vec<f64> { line.split(' ').map(|word| word.parse().unwrap()).collect() };
        for (one, two) in numbers(one).into_iter().zip(numbers(two)) {
            assert!(
                (one - two).abs() <= 1e-5 * one.abs(),
                "{one} and {two}: equal within rounding"
            );
        }
    }
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn kill_9_of_one_rank_ends_the_job_over_mpi_and_names_the_rank() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = command(&[], "mpi", 4, &["--use_deepspeed", "--zero_stage", "2"]);
    job.args(["--steps", "1000000", "--logging_steps", "1"]);
    job.env("SCONCE_FLIGHT_RECORDER", folder.path());
    let mut job = job.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(job.stdout.take().unwrap()).lines();
    let is_step = |line: &String| line.starts_with("[rank 0] step") && line.contains("loss");
    let mut steps = lines.map_while(Result::ok).filter(is_step);
    assert!(steps.nth(1).is_some(), "two steps were printed");
    let victim = rank_of_job(job.id(), "2").expect("rank 2 runs");
    let killed = Command::new("kill").args(["-9", &victim.to_string()]).status();
    assert!(killed.unwrap().success());
    steps.for_each(drop);
    let ended = job.wait_with_output().unwrap();
    assert!(!ended.status.success());
    let stderr = text(&ended.stderr);
    assert!(stderr.contains("rank 2 ") && stderr.contains("signal 9"), "{stderr}");
    let last = "; the first rank that it saw fail is rank 2\n";
    assert!(stderr.contains("\nerror: mpirun ") && stderr.contains(last), "{stderr}");
}

/// The process of a rank among those that descend from `job`.
fn rank_of_job(job: u32, rank: &str) -> Option<u32> {
    let variable = format!("OMPI_COMM_WORLD_RANK={rank}");
    let descends = |pid: u32| {
        let mut line = std::iter::successors(Some(pid), |pid| parent_of(*pid));
        line.any(|ancestor| ancestor == job)
    };
    processes().find(|pid| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        descends(*pid) && variables.any(|set| set == variable.as_bytes())
    })
}

/// Trains the shipped model; returns its weights' file and the metrics but for the speeds.
fn train(backend: &str, ranks: usize, strategy: &[&str], output: &Path) -> (Vec<u8>, Vec<String>) {
    train_as(&[], backend, ranks, strategy, output)
}

/// The same, in ranks that are started by `rank`.
fn train_as(
    rank: &[OsString],
    backend: &str,
    ranks: usize,
    strategy: &[&str],
    output: &Path,
) -> (Vec<u8>, Vec<String>) {
    let metrics = output.with_extension("jsonl");
    let mut command = command(rank, backend, ranks, strategy);
    command.args(["--steps", "6", "--lr", "1e-2", "--output_dir"]);
    command.arg(output).arg("--metrics_out").arg(&metrics);
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

/// `sconce launch` of the training program, up to its arguments.
fn command(rank: &[OsString], backend: &str, ranks: usize, strategy: &[&str]) -> Command {
    let mut command = Command::new(sconce());
    command.args(["launch", "--backend", backend, "-n", &ranks.to_string()]);
    command.args(strategy).args(rank).arg(finetune_llama());
    // Open MPI's own switch for root.
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    command
}
