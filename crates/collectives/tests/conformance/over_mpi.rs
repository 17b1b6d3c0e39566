//! The same suite over MPI: this program again, under `mpirun`, one test after the other on every rank.

use std::process::Command;

/// Set in processes that are ranks of a job.
const IS_RANK: &str = "SCONCE_TEST_OVER_MPI";

/// Says whether this process is a rank of a job, started by one of the tests below.
pub(crate) fn is_rank() -> bool {
    std::env::var_os(IS_RANK).is_some()
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn over_mpi_on_2_ranks() {
    run_suite(2);
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn over_mpi_on_4_ranks() {
    run_suite(4);
}

fn run_suite(ranks: usize) {
    let mut job = Command::new("mpirun");
    job.args(["-n", &ranks.to_string()])
        .arg(std::env::current_exe().unwrap())
        // In one order on all ranks.
        .args(["--test-threads=1", "--color=never", "--skip", "over_"])
        .envs([(IS_RANK, "1"), ("SCONCE_BACKEND", "mpi")])
        // Open MPI's own switches: root, and more ranks than cores.
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1");
    let output = job.output().expect("mpirun is in PATH; Debian has it in openmpi-bin");
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    // mpirun's status is that of the ranks; their lines may be mingled.
    assert!(
        output.status.success() && stdout.contains("0 failed"),
        "{stdout}\n{stderr}"
    );
}
