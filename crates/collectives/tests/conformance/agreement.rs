//! Ranks that call different operations all get an error that names both sides.

use crate::{on_ranks, over_nccl};
use sconce_collectives::{Communicator, Error, ReduceOp, Result};

fn both_fail(
    first: impl Fn(&dyn Communicator) -> Result<()> + Sync,
    second: impl Fn(&dyn Communicator) -> Result<()> + Sync,
    names: &[&str],
) {
    on_ranks(3, |group| {
        let result = if group.rank() == 1 { second(group) } else { first(group) };
        let message = result.expect_err("the calls differ").to_string();
        for name in names {
            assert!(message.contains(name), "{name:?} is missing in {message:?}");
        }
        // The group is unusable from now on, on every rank.
        assert!(matches!(group.barrier(), Err(Error::Aborted { .. })));
    });
}

#[test]
fn another_operation() {
    both_fail(
        |g| g.all_reduce(&mut [0f32; 4], ReduceOp::Sum),
        |g| g.barrier(),
        &["rank 0: all_reduce(sum) of 4 f32", "rank 1: barrier"],
    );
}

#[test]
fn another_length_dtype_reduction_label_or_root() {
    let reduce = |op| move |g: &dyn Communicator| g.all_reduce(&mut [0f32; 4], op);
    both_fail(
        reduce(ReduceOp::Sum),
        |g| g.all_reduce(&mut [0f32; 5], ReduceOp::Sum),
        &["of 4 f32", "of 5 f32"],
    );
    both_fail(
        reduce(ReduceOp::Sum),
        |g| g.all_reduce(&mut [0i64; 4], ReduceOp::Sum),
        &["4 f32", "4 i64"],
    );
    both_fail(reduce(ReduceOp::Sum), reduce(ReduceOp::Max), &["(sum)", "(max)"]);
    let gather = |label| move |g: &dyn Communicator| g.all_gather_each(&[1u8; 3], label, |_, _| ());
    both_fail(gather(1), gather(2), &["label #000003", "label #000004"]);
    let gather = |label| move |g: &dyn Communicator| g.all_gather_labelled(&mut vec![1u8; 3 * g.size()], 3, label);
    both_fail(gather(1), gather(2), &["counts #000003", "counts #000004"]);
    let broadcast = |root| move |g: &dyn Communicator| g.broadcast(&mut [0u8; 9], root);
    both_fail(broadcast(0), broadcast(2), &["root 0", "root 2"]);
}

#[test]
fn another_length_on_large_buffers() {
    both_fail(
        |g| g.all_reduce(&mut vec![0f32; 1 << 20], ReduceOp::Sum),
        |g| g.all_reduce(&mut vec![0f32; (1 << 20) + 1], ReduceOp::Sum),
        &["1048576", "1048577"],
    );
}

#[test]
fn other_counts_in_all_to_all() {
    on_ranks(2, |group| {
        let receive: &[usize] = if group.rank() == 0 { &[1, 3] } else { &[2, 1] };
        let send: &[usize] = if group.rank() == 0 { &[1, 2] } else { &[2, 1] };
        let mut output = vec![0u8; receive.iter().sum()];
        let message = group
            .all_to_all_v(&[0; 3], &mut output, send, receive)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("rank 1: sends 2 bytes to 0") && message.contains("rank 0: expects 3 from 1"),
            "{message}"
        );
    });
}

#[test]
fn a_message_of_another_type_or_length() {
    on_ranks(2, |group| {
        if group.rank() == 0 {
            // Where sending does not wait for the receiver, the failure shows in the next operation.
            let sent = group.send(&[1f32; 4], 1);
            assert!(sent.is_ok() || over_nccl::is_rank());
        } else {
            let message = group.recv(&mut [0u32; 4], 0).unwrap_err().to_string();
            assert!(
                message.contains("rank 0: send of 4 f32") && message.contains("rank 1: receive of 4 u32"),
                "{message}"
            );
        }
        assert!(group.barrier().is_err());
    });
}

#[test]
fn a_receive_against_a_collective() {
    on_ranks(2, |group| {
        let result = if group.rank() == 0 {
            group.recv(&mut [0u8; 1], 1)
        } else {
            group.barrier()
        };
        let message = result.unwrap_err().to_string();
        assert!(
            message.contains("rank 0: receive of 1 u8") && message.contains("rank 1: barrier"),
            "{message}"
        );
    });
}

#[test]
fn wrong_arguments_fail_on_the_calling_rank_alone() {
    on_ranks(2, |group| {
        let message = group
            .reduce_scatter(&[0f32; 5], &mut [0f32; 2], ReduceOp::Sum)
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("reduce_scatter") && message.contains("5 elements, expected 4"),
            "{message}"
        );
        let message = group.all_reduce(&mut [1u32], ReduceOp::Mean).unwrap_err().to_string();
        assert!(message.contains("mean of u32"), "{message}");
        let message = group.send(&[0u8], group.rank()).unwrap_err().to_string();
        assert!(message.contains("itself"), "{message}");
        // Nothing was announced, so the group is intact.
        group.barrier().unwrap();
    });
}
