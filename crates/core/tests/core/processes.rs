//! Ranks among each other: order, parts, flags, threads, batch sizes that fit.

use super::{accelerator, on_ranks};
use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;
use sconce_core::{Error, RandomState, ReduceOp, is_out_of_memory, launch_threads};
use std::collections::BTreeMap;
use std::sync::Mutex;

#[test]
fn the_main_process_is_done_before_any_other_begins() {
    for world in 1..=4 {
        let events = Mutex::new(Vec::new());
        on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            let rank = acc.world().rank;
            let outcome = acc.main_process_first(|| {
                events.lock().unwrap().push((rank, "begins"));
                events.lock().unwrap().push((rank, "ends"));
                rank
            });
            assert_eq!(outcome.unwrap(), rank);
        });
        let events = events.into_inner().unwrap();
        assert_eq!(events[..2], [(0, "begins"), (0, "ends")]);
        assert_eq!(events.len(), 2 * world);
    }
}

#[test]
fn what_is_done_in_order_is_done_by_one_rank_after_another() {
    for world in 1..=4 {
        let order = Mutex::new(Vec::new());
        on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            for _ in 0..3 {
                acc.in_order(|| order.lock().unwrap().push(acc.world().rank)).unwrap();
            }
        });
        let expected = Vec::from_iter((0..3).flat_map(|_| 0..world));
        assert_eq!(order.into_inner().unwrap(), expected);
    }
}

#[test]
fn a_flag_that_one_rank_raises_is_seen_once_by_all() {
    for world in 1..=4 {
        for raised_by in 0..world {
            let seen = on_ranks(world, |communicator| {
                let acc = accelerator(communicator);
                if acc.world().rank == raised_by {
                    acc.set_trigger();
                }
                [acc.check_trigger().unwrap(), acc.check_trigger().unwrap()]
            });
            assert_eq!(seen, vec![[true, false]; world]);
        }
    }
}

#[test]
fn random_states_become_that_of_rank_0() {
    let keys = on_ranks(3, |communicator| {
        let acc = accelerator(communicator);
        RandomState::draw_key();
        acc.synchronize_random_state().unwrap();
        RandomState::draw_key()
    });
    assert!(keys[1] == keys[0] && keys[2] == keys[0]);
}

/// What every rank of two gets of `inputs`, plain and padded.
fn parts<S: sconce_core::Split + Send + Sync>(inputs: &S) -> Vec<[S; 2]> {
    on_ranks(2, |communicator| {
        let acc = accelerator(communicator);
        [
            acc.split_between_processes(inputs).unwrap(),
            acc.split_between_processes_padded(inputs).unwrap(),
        ]
    })
}

/// The table of the reference's split, recorded on two ranks.
#[test]
fn inputs_are_split_as_in_the_reference() {
    let expected = [[vec![0, 1, 2], vec![0, 1, 2]], [vec![3, 4], vec![3, 4, 4]]];
    assert_eq!(parts(&vec![0, 1, 2, 3, 4]), expected);
    assert_eq!(parts(&vec![9]), [[vec![9], vec![9]], [vec![], vec![9]]]);
    assert!(parts(&Vec::<u8>::new()).concat().concat().is_empty());
    let map = BTreeMap::from([("a", vec![1, 2, 3]), ("b", vec![4, 5, 6])]);
    let [first, second] = &parts(&map)[..] else {
        panic!("two ranks")
    };
    assert_eq!(first[0], BTreeMap::from([("a", vec![1, 2]), ("b", vec![4, 5])]));
    assert_eq!(second[0], BTreeMap::from([("a", vec![3]), ("b", vec![6])]));
    assert_eq!(second[1], BTreeMap::from([("a", vec![3, 3]), ("b", vec![6, 6])]));
    let rows = Tensor::arange(0f32, 6.0, &Device::Cpu)
        .unwrap()
        .reshape((3, 2))
        .unwrap();
    let parts = parts(&(rows, vec!['x', 'y', 'z']));
    assert_eq!(parts[1][0].0.to_vec2::<f32>().unwrap(), [[4.0, 5.0]]);
    assert_eq!(parts[1][1].0.to_vec2::<f32>().unwrap(), [[4.0, 5.0], [4.0, 5.0]]);
    assert_eq!(parts[1][1].1, ['z', 'z']);
}

#[test]
fn parts_of_different_lengths_are_an_error_that_names_them() {
    let map = BTreeMap::from([("a", vec![1, 2, 3]), ("b", vec![4])]);
    let error = accelerator(sconce_collectives::single())
        .split_between_processes(&map)
        .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("b: 1 elements") && text.contains("3 elements, as in a"),
        "{text}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn parts_joined_in_rank_order_are_the_whole(inputs in prop::collection::vec(any::<u16>(), 0..40), world in 1usize..5) {
        let parts = on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            let part = acc.split_between_processes(&inputs).unwrap();
            (part.len(), part, acc.split_between_processes_padded(&inputs).unwrap().len())
        });
        let joined: Vec<u16> = parts.iter().flat_map(|(_, part, _)| part.clone()).collect();
        prop_assert_eq!(&joined, &inputs);
        let most = parts[0].0;
        let differ_by_one = parts.iter().all(|part| part.0 + 1 >= most && part.0 <= most);
        prop_assert!(differ_by_one && parts.iter().all(|part| part.2 == most));
    }
}

#[test]
fn a_reduction_is_scaled() {
    for sum in on_ranks(2, |communicator| {
        let acc = accelerator(communicator);
        let ones = Tensor::ones(3, DType::F32, &Device::Cpu).unwrap();
        acc.reduce_scaled(&ones, ReduceOp::Sum, 0.5)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap()
    }) {
        assert_eq!(sum, [1.0; 3]);
    }
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("CUDA_ERROR_OUT_OF_MEMORY")]
    Memory,
    #[error("no such file")]
    Other,
}

/// Sizes recorded from the reference.
const SIZES: [usize; 23] = [
    128, 115, 103, 92, 82, 73, 65, 58, 52, 46, 41, 36, 32, 28, 25, 22, 19, 17, 15, 13, 11, 9, 8,
];

#[test]
fn batch_sizes_shrink_by_a_tenth_until_all_ranks_have_memory_for_them() {
    let fits = |rank: usize, size: usize| if rank == 0 { size < 100 } else { size <= 8 };
    for world in 1..=3 {
        let found = on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            let mut tried = Vec::new();
            let found = acc.find_executable_batch_size(128, |size| {
                tried.push(size);
                fits(acc.world().rank, size).then_some(size).ok_or(Failure::Memory)
            });
            (tried, found.unwrap().0)
        });
        for (tried, size) in found {
            assert_eq!(size, if world == 1 { 92 } else { 8 });
            let end = SIZES.iter().position(|other| *other == size).unwrap();
            assert_eq!(tried, SIZES[..=end]);
        }
    }
}

#[test]
fn when_nothing_fits_or_something_else_fails_all_ranks_are_told() {
    let outcomes = on_ranks(2, |communicator| {
        let acc = accelerator(communicator);
        let nothing = acc
            .find_executable_batch_size(20, |_| Err::<(), _>(Failure::Memory))
            .unwrap_err();
        let is_second = acc.world().rank == 1;
        let other = acc.find_executable_batch_size(20, |_| if is_second { Err(Failure::Other) } else { Ok(()) });
        acc.wait_for_everyone().unwrap();
        (nothing, other.unwrap_err())
    });
    for (nothing, _) in &outcomes {
        assert!(matches!(nothing, Error::NoBatchSize { start: 20 }), "{nothing}");
    }
    assert_eq!(outcomes[0].1.to_string(), "rank 1: no such file");
    let none = accelerator(sconce_collectives::single()).find_executable_batch_size(0, |_| Ok::<_, Failure>(()));
    assert!(matches!(none, Err(Error::NoBatchSize { start: 0 })));
}

#[test]
fn memory_that_ran_out_is_told_from_other_failures() {
    let wrapped = candle_core::Error::Msg("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")".into());
    assert!(is_out_of_memory(&Error::from(wrapped)));
    assert!(is_out_of_memory(&std::io::Error::from(std::io::ErrorKind::OutOfMemory)));
    assert!(is_out_of_memory(&Vec::<u8>::new().try_reserve(usize::MAX).unwrap_err()));
    assert!(!is_out_of_memory(&Failure::Other));
}

#[test]
fn threads_return_in_rank_order_and_the_first_failure_is_told_with_its_rank() {
    let ranks = launch_threads(4, |builder| Ok::<_, Error>(builder.build()?.world().rank)).unwrap();
    assert_eq!(ranks, [0, 1, 2, 3]);
    // The others wait for a rank that fails, by an error or a panic, and are ended with it.
    for panics in [false, true] {
        let failed = launch_threads(3, |builder| {
            let acc = builder.build()?;
            if acc.world().rank == 2 {
                assert!(!panics, "on purpose");
                return Err("no more data".into());
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(acc.wait_for_everyone()?)
        });
        let expected = if panics {
            "rank 2: panicked: on purpose"
        } else {
            "rank 2: no more data"
        };
        assert_eq!(failed.unwrap_err().to_string(), expected);
    }
    assert!(launch_threads(0, |_| Ok::<_, Error>(())).is_err());
}
