//! Messages between two ranks.

use crate::{SIZES, on_every_backend, on_ranks};

#[test]
fn messages_of_one_pair_arrive_whole_and_in_order() {
    on_ranks(3, |group| {
        for count in SIZES {
            let message = |n: usize| -> Vec<i64> { (0..count).map(|i| (i * 10 + n) as i64).collect() };
            match group.rank() {
                0 => (0..3).for_each(|n| group.send(&message(n), 2).unwrap()),
                2 => (0..3).for_each(|n| {
                    let mut received = vec![0i64; count];
                    group.recv(&mut received, 0).unwrap();
                    assert!(received == message(n), "message {n} of {count}");
                }),
                _ => {}
            }
        }
    });
}

#[test]
fn a_ring_of_send_receive_moves_large_messages_without_deadlock() {
    on_every_backend(|group| {
        let (rank, size) = (group.rank(), group.size());
        if size == 1 {
            return;
        }
        for count in [1, 10_000, 300_000] {
            let message = vec![rank as u32; count];
            let mut received = vec![u32::MAX; count];
            group
                .send_receive(&message, (rank + 1) % size, &mut received, (rank + size - 1) % size)
                .unwrap();
            assert!(received.iter().all(|value| *value as usize == (rank + size - 1) % size));
        }
    });
}

#[test]
fn collectives_and_messages_may_alternate() {
    on_ranks(2, |group| {
        for round in 0..50u32 {
            if group.rank() == 0 {
                group.send(&[round], 1).unwrap();
            } else {
                let mut received = [0];
                group.recv(&mut received, 0).unwrap();
                assert_eq!(received, [round]);
            }
            group.barrier().unwrap();
        }
    });
}
