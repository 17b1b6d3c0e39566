//! The launching side; see `main.rs` for the ranks'.

use crate::{end, rank_program, start, this_program};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command};

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
    let (code, printed) = signal_rank_1(start(3, "wait"), "-KILL");
    assert_ne!(code, Some(0));
    assert!(printed.contains("rank 1 ") && printed.contains("signal 9"), "{printed}");
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn a_stuck_rank_is_named_and_the_job_ends() {
    let (code, printed) = signal_rank_1(start(3, "stuck"), "-STOP");
    assert_ne!(code, Some(0));
    // A rank that waits for one that waits for rank 1 names both.
    assert!(printed.contains("1], which did not come"), "{printed}");
}

#[test]
#[cfg_attr(not(feature = "mpi"), ignore = "needs the feature mpi")]
fn a_rank_that_is_stuck_while_groups_are_made_ends_the_job() {
    let (code, printed) = signal_rank_1(start(3, "stuck_splitting"), "-STOP");
    assert_ne!(code, Some(0));
    // It is stopped before the agreement, or, mostly, between it and MPI's own call.
    let is_named = printed.contains("1], which did not come");
    let is_inside = printed.contains("inside MPI, without a deadline, in split");
    assert!(is_named || is_inside, "{printed}");
}

/// Sends a signal to rank 1 once all three ranks are there; returns the job's exit code and what it printed.
fn signal_rank_1(mut job: Child, signal: &str) -> (Option<i32>, String) {
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
    let sent = Command::new("kill")
        .args([signal, &pid.expect("rank 1 is there")])
        .status();
    assert!(sent.unwrap().success());
    let printed = lines.collect::<Vec<_>>().join("\n");
    end(job, printed)
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
