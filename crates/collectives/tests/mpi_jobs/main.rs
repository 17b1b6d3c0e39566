//! How jobs under `mpirun` begin and end: what a world of MPI's is, and that no rank's failure leaves the others waiting.
//!
//! Each test starts copies of this program: a copy runs one test, `rank_main`, with its part in the environment.

use sconce_collectives::{Communicator, Options, ReduceOp, World, connect};
use std::io::{BufRead, BufReader, Read};
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
    let options = Options {
        timeout: Duration::from_secs(300),
        flight_recorder: None,
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

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn a_job_whose_ranks_all_go_ends_well() {
    let (code, printed) = end(start(3, "all_go"), String::new());
    assert_eq!(code, Some(0), "{printed}");
    assert_eq!(printed.matches("ready").count(), 3, "{printed}");
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn a_killed_rank_ends_the_job_with_its_name() {
    let mut job = start(3, "wait");
    let mut lines = BufReader::new(job.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut pid = None;
    for _ in 0..3 {
        // The runner's own words may stand before it.
        let line = lines
            .by_ref()
            .find(|line| line.contains("ready "))
            .expect("three ranks come");
        let mut words = line.split("ready ").nth(1).unwrap().split_whitespace();
        if words.next() == Some("1") {
            pid = words.next().map(str::to_owned);
        }
    }
    let killed = Command::new("kill")
        .args(["-9", &pid.expect("rank 1 is there")])
        .status();
    assert!(killed.unwrap().success());
    let (code, printed) = end(job, lines.collect::<Vec<_>>().join("\n"));
    assert_ne!(code, Some(0));
    assert!(printed.contains("rank 1 ") && printed.contains("signal 9"), "{printed}");
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn a_rank_that_exits_early_is_named_by_the_others() {
    let (code, printed) = end(start(3, "exit"), String::new());
    assert_ne!(code, Some(0));
    assert!(printed.contains("rank 1 left the group"), "{printed}");
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn a_rank_that_panics_is_named_by_the_others() {
    let (code, printed) = end(start(3, "panic"), String::new());
    assert_ne!(code, Some(0));
    assert!(printed.contains("rank 1 panicked"), "{printed}");
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn ranks_that_are_no_world_to_mpi_are_refused() {
    let mut rank = rank_program(Command::new(this_program()), "all_go");
    rank.envs([
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "2"),
    ]);
    let (code, printed) = end(rank.spawn().unwrap(), String::new());
    assert_eq!(code, Some(4), "{printed}");
    let expected = "refused MPI says that this is rank 0 of 1, the environment that it is rank 0 of 2: start all ranks \
                    with one `mpirun -n N PROGRAM`";
    assert!(printed.contains(expected), "{printed}");
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn a_plain_start_is_refused() {
    let mut rank = rank_program(Command::new(this_program()), "all_go").spawn().unwrap();
    let mut printed = String::new();
    rank.stdout.take().unwrap().read_to_string(&mut printed).unwrap();
    let (code, printed) = end(rank, printed);
    assert_eq!(code, Some(4), "{printed}");
    assert!(
        printed.contains("a world of one: start it with `mpirun -n N PROGRAM`"),
        "{printed}"
    );
}
