//! Ranks that are gone or late become errors on the others, in time.

use crate::{on_ranks, on_ranks_with};
use sconce_collectives::{Error, Options, ReduceOp};
use std::sync::atomic::{AtomicBool, Ordering};
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
    on_ranks_with(2, &options(Duration::from_secs(60)), |group, _| {
        if group.rank() == 0 {
            let message = group.barrier().unwrap_err().to_string();
            assert!(message.contains("rank 1 panicked"), "{message}");
            return;
        }
        let panicking = std::thread::spawn(move || {
            let _group = group;
            std::panic::resume_unwind(Box::new("on purpose"));
        });
        panicking.join().unwrap_err();
    });
}

#[test]
fn a_late_rank_is_named_when_the_deadline_passes() {
    let start = Instant::now();
    on_ranks_with(3, &options(Duration::from_millis(300)), |group, all_meet| {
        if group.rank() < 2 {
            match group.barrier().unwrap_err() {
                Error::Timeout { missing, seconds, .. } => assert!(missing == [2] && seconds >= 0.3),
                Error::Aborted { reason, .. } => assert!(reason.contains("[2]"), "{reason}"),
                other => panic!("{other}"),
            }
        }
        all_meet();
    });
    assert!(start.elapsed() < Duration::from_secs(20));
}

fn options(timeout: Duration) -> Options {
    Options {
        timeout,
        ..Options::default()
    }
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
        ..Options::default()
    };
    let failed = AtomicBool::new(false);
    on_ranks_with(2, &options, |group, _| {
        group.barrier().unwrap();
        let mut values = [0f32; 2];
        if group.rank() == 0 {
            group.broadcast(&mut values, 0)
        } else {
            group.barrier()
        }
        .unwrap_err();
        failed.store(true, Ordering::SeqCst);
    });
    if !failed.into_inner() {
        return; // a rank of a job that is not one of the two
    }
    let files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    assert!(!files.is_empty());
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let failure = lines[0]["failure"].as_str().unwrap();
        assert!(failure.contains("different operations"), "{failure}");
        assert_eq!(lines[1]["operation"], "barrier");
        assert_eq!(lines[1]["ended"], true);
        let own = ["broadcast of 2 f32 with root 0", "barrier"];
        assert_eq!(lines[2]["operation"], own[lines[0]["rank"].as_u64().unwrap() as usize]);
        assert_eq!(lines[2]["ended"], false);
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
