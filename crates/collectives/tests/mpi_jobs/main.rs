//! How jobs under `mpirun` begin and end: what a world of MPI's is, and that no rank's failure leaves the others waiting.
//!
//! Each test starts copies of this program: a copy runs one test, `rank_main`, with its part in the environment.

mod over_mpi;

use sconce_collectives::{Communicator, Options, ReduceOp, World, connect};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Names what a rank is to do.
const PART: &str = "SCONCE_TEST_PART";

/// Longer than anything here takes on a busy machine, and much shorter than the ranks' deadlines.
const SOON: Duration = Duration::from_secs(30);

/// The ranks' side; does nothing unless started by one of the tests below.
#[test]
fn rank_main() {
    let Ok(part) = std::env::var(PART) else { return };
    let timeout = if part.starts_with("stuck") { 2 } else { 300 };
    let options = Options {
        timeout: Duration::from_secs(timeout),
        ..Options::default()
    };
    let connection = match World::from_env().and_then(|world| connect(&world, &options)) {
        Ok(connection) => connection,
        Err(error) => {
            println!("refused {error}");
            std::process::exit(4);
        }
    };
    let group = &*connection.communicator;
    group.barrier().unwrap();
    println!("ready {} {}", group.rank(), std::process::id());
    let is_odd_one = group.rank() == 1;
    match part.as_str() {
        "all_go" => {}
        "wait" if is_odd_one => std::thread::park(),
        // Stopped by the test at some moment of this.
        "stuck" => fail_reducing(group),
        "stuck_splitting" => fail_splitting(group),
        "exit" if is_odd_one => std::process::exit(3),
        "panic" if is_odd_one => panic!("on purpose"),
        _ => fail_waiting(group),
    }
}

fn fail_waiting(group: &dyn Communicator) {
    let error = group.all_reduce(&mut vec![0f32; 1 << 20], ReduceOp::Sum).unwrap_err();
    println!("failed {error}");
    std::process::exit(1);
}

fn fail_reducing(group: &dyn Communicator) {
    let mut values = vec![0f32; 1 << 22];
    loop {
        if let Err(error) = group.all_reduce(&mut values, ReduceOp::Sum) {
            println!("failed {error}");
            std::process::exit(1);
        }
    }
}

fn fail_splitting(group: &dyn Communicator) {
    loop {
        // Nobody has a color: MPI is asked, and makes no group.
        if let Err(error) = group.split(None, 0) {
            println!("failed {error}");
            std::process::exit(1);
        }
    }
}

fn rank_program(mut command: Command, part: &str) -> Command {
    command
        .args(["--exact", "rank_main", "--nocapture"])
        .envs([(PART, part), ("SCONCE_BACKEND", "mpi")])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn this_program() -> std::path::PathBuf {
    std::env::current_exe().unwrap()
}

fn start(ranks: usize, part: &str) -> Child {
    let mut job = Command::new("mpirun");
    job.args(["-n", &ranks.to_string()]).arg(this_program());
    // Open MPI's own switches: root, and more ranks than cores.
    job.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")])
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1");
    let started = rank_program(job, part).spawn();
    started.expect("mpirun is in PATH; Debian has it in openmpi-bin")
}

/// Waits for a job's end; returns its exit code and all that it printed.
fn end(job: Child, printed: String) -> (Option<i32>, String) {
    let start = Instant::now();
    let output = job.wait_with_output().unwrap();
    assert!(start.elapsed() < SOON, "the job ended after {:?}", start.elapsed());
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    (output.status.code(), printed + &stdout + &stderr)
}
