//! Operations behind other work: order, results, failure.

use crate::on_every_backend;
use sconce_collectives::ReduceOp;

#[test]
fn every_operation_can_run_behind_other_work_and_returns_its_buffer() {
    on_every_backend(|group| {
        let size = group.size();
        let reduced = group.run_behind(vec![1f32; 100_000], |values, group| {
            group.all_reduce(values, ReduceOp::Sum)
        });
        let gathered = group.run_behind(vec![0u32; size], |values, group| {
            group.all_gather(&[group.rank() as u32], values)
        });
        let barrier = group.run_behind((), |(), group| group.barrier());
        assert_eq!(gathered.wait().unwrap(), (0..size as u32).collect::<Vec<_>>());
        assert!(reduced.wait().unwrap().iter().all(|value| *value == size as f32));
        barrier.wait().unwrap();
    });
}

#[test]
fn blocking_calls_wait_for_what_was_started_before() {
    on_every_backend(|group| {
        let mut pendings = Vec::new();
        for round in 0..20u32 {
            pendings.push(group.run_behind(vec![round; 1000], |values, group| {
                group.all_reduce(values, ReduceOp::Max)
            }));
            // A blocking operation of another kind: out of order, signatures would differ.
            group.barrier().unwrap();
        }
        for (round, mut pending) in pendings.into_iter().enumerate() {
            assert!(pending.is_complete());
            assert_eq!(pending.wait().unwrap()[0], round as u32);
        }
    });
}

#[test]
fn a_failing_job_reports_through_its_handle() {
    on_every_backend(|group| {
        let size = group.size();
        let pending = group.run_behind([0f32; 2], move |values, group| group.broadcast(values, size));
        let message = pending.wait().unwrap_err().to_string();
        assert!(message.contains("root") && message.contains("broadcast"), "{message}");
    });
}
