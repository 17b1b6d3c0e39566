//! Ranks that are gone or late become errors on the others, in time.

use crate::{on_ranks, threads};
use sconce_collectives::{Error, Options, ReduceOp, shm};
use std::time::{Duration, Instant};

#[test]
fn a_rank_that_leaves_early_is_named() {
    on_ranks(3, |group| {
        if group.rank() == 2 {
            return;
        }
        // `group` of rank 2 is dropped when its thread ends.
        let error = group.all_reduce(&mut vec![0f32; 100_000], ReduceOp::Sum).unwrap_err();
        let message = error.to_string();
        assert!(message.contains("rank 2 left the group"), "{message}");
    });
}

#[test]
fn a_rank_that_panics_is_named() {
    let ranks = threads(2, Duration::from_secs(60));
    let mut ranks = ranks.into_iter();
    let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    let panicking = std::thread::spawn(move || {
        let _group = second;
        std::panic::resume_unwind(Box::new("on purpose"));
    });
    let message = first.barrier().unwrap_err().to_string();
    assert!(message.contains("rank 1 panicked"), "{message}");
    panicking.join().unwrap_err();
}

#[test]
fn a_late_rank_is_named_when_the_deadline_passes() {
    let ranks = threads(3, Duration::from_millis(300));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for group in &ranks[..2] {
            scope.spawn(move || match group.barrier().unwrap_err() {
                Error::Timeout { missing, seconds, .. } => assert!(missing == [2] && seconds >= 0.3),
                Error::Aborted { reason, .. } => assert!(reason.contains("[2]"), "{reason}"),
                other => panic!("{other}"),
            });
        }
    });
    assert!(start.elapsed() < Duration::from_secs(20));
}

#[test]
fn an_abort_reaches_ranks_that_wait() {
    on_ranks(3, |group| {
        if group.rank() == 0 {
            group.abort("the disk is full");
        } else {
            let message = group.barrier().unwrap_err().to_string();
            assert!(message.contains("aborted by rank 0: the disk is full"), "{message}");
        }
    });
}

#[test]
fn the_last_operations_are_written_out_on_failure() {
    let folder = std::env::temp_dir().join(format!("sconce-flight-test-{}", std::process::id()));
    let options = Options {
        timeout: Duration::from_secs(60),
        flight_recorder: Some(folder.clone()),
    };
    let ranks = shm::threads(2, &options).unwrap();
    std::thread::scope(|scope| {
        for group in &ranks {
            scope.spawn(move || {
                group.barrier().unwrap();
                let mut values = [0f32; 2];
                if group.rank() == 0 {
                    group.broadcast(&mut values, 0)
                } else {
                    group.barrier()
                }
                .unwrap_err();
            });
        }
    });
    let text =
        std::fs::read_to_string(folder.join(format!("sconce-flight-threads-rank0-{}.jsonl", std::process::id())))
            .unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines[0]["failure"].as_str().unwrap().contains("different operations"));
    assert_eq!(lines[1]["operation"], "barrier");
    assert_eq!(lines[1]["ended"], true);
    assert_eq!(lines[2]["operation"], "broadcast of 2 f32 with root 0");
    assert_eq!(lines[2]["ended"], false);
}
