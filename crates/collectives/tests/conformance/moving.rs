//! Data that is moved, not reduced, arrives whole, in order and nowhere else.

use crate::reducing::uneven;
use crate::{SIZES, on_every_backend, value};
use sconce_collectives::{Communicator, Counts};

fn own(rank: usize, count: usize) -> Vec<u32> {
    (0..count)
        .map(|index| (rank * 1_000_000 + value(rank, index) * 1000 + index % 997) as u32)
        .collect()
}

fn offsets(counts: &[usize]) -> Vec<usize> {
    (0..counts.len()).map(|rank| counts[..rank].iter().sum()).collect()
}

#[test]
fn all_gather_joins_inputs_in_rank_order() {
    on_every_backend(|group| {
        for count in SIZES {
            let whole: Vec<u32> = (0..group.size()).flat_map(|rank| own(rank, count)).collect();
            let mut output = vec![0; whole.len()];
            group.all_gather(&own(group.rank(), count), &mut output).unwrap();
            assert!(output == whole, "{count}");
        }
    });
}

#[test]
fn all_gather_takes_uneven_and_empty_inputs_in_private_and_shared_memory() {
    on_every_backend(|group| {
        for count in SIZES {
            let counts = uneven(count, group.size());
            let whole: Vec<u32> = (0..group.size()).flat_map(|rank| own(rank, counts[rank])).collect();
            let mut output = vec![7; count];
            group
                .all_gather_v(&own(group.rank(), counts[group.rank()]), &mut output, &counts)
                .unwrap();
            assert!(output == whole, "all_gather_v of {count}");

            let mut shared = group.allocate_elements::<u32>(count).unwrap();
            let start = offsets(&counts)[group.rank()];
            for buffer in [&mut vec![0; count][..], shared.as_mut_slice()] {
                buffer[start..][..counts[group.rank()]].copy_from_slice(&own(group.rank(), counts[group.rank()]));
                group.all_gather_in_place(buffer, Counts::Each(&counts)).unwrap();
                assert!(buffer == whole, "all_gather_in_place of {count}");
            }
        }
    });
}

#[test]
fn all_gather_each_hands_every_ranks_input_on_once_from_private_and_shared_memory() {
    on_every_backend(|group| {
        for count in SIZES {
            let mut shared = group.allocate_elements::<u32>(count).unwrap();
            shared.as_mut_slice().copy_from_slice(&own(group.rank(), count));
            let private = own(group.rank(), count);
            for input in [&private[..], shared.as_slice()] {
                let mut got = vec![None; group.size()];
                group
                    .all_gather_each(input, 7, |rank, values| {
                        assert!(got[rank].replace(values.to_vec()).is_none(), "{rank} comes once");
                    })
                    .unwrap();
                let expected: Vec<_> = (0..group.size()).map(|rank| Some(own(rank, count))).collect();
                assert!(got == expected, "{count}");
            }
        }
    });
}

#[test]
fn broadcast_gives_every_rank_the_roots_values() {
    on_every_backend(|group| {
        for count in SIZES {
            for root in 0..group.size() {
                let mut shared = group.allocate_elements::<u32>(count).unwrap();
                for buffer in [&mut vec![0; count][..], shared.as_mut_slice()] {
                    buffer.copy_from_slice(&own(group.rank(), count));
                    group.broadcast(buffer, root).unwrap();
                    assert!(buffer == own(root, count), "{count} from {root}");
                }
            }
        }
    });
}

#[test]
fn gather_and_scatter_are_inverse_and_touch_only_the_root() {
    on_every_backend(|group| {
        for count in SIZES {
            for root in [0, group.size() - 1] {
                let counts = uneven(count, group.size());
                let mine = own(group.rank(), counts[group.rank()]);
                let mut whole = (group.rank() == root).then(|| vec![0; count]);
                group.gather_v(&mine, whole.as_deref_mut(), &counts, root).unwrap();
                if let Some(whole) = &whole {
                    let expected: Vec<u32> = (0..group.size()).flat_map(|rank| own(rank, counts[rank])).collect();
                    assert!(*whole == expected, "gather of {count} to {root}");
                }
                let mut back = vec![0; mine.len()];
                group.scatter_v(whole.as_deref(), &mut back, &counts, root).unwrap();
                assert!(back == mine, "scatter of {count} from {root}");
            }
        }
    });
}

#[test]
fn equal_gather_and_scatter_need_no_counts() {
    on_every_backend(|group| {
        let mine = own(group.rank(), 5);
        let mut whole = (group.rank() == 0).then(|| vec![0; 5 * group.size()]);
        group.gather(&mine, whole.as_deref_mut(), 0).unwrap();
        let mut back = vec![0; 5];
        group.scatter(whole.as_deref(), &mut back, 0).unwrap();
        assert_eq!(back, mine);
    });
}

#[test]
fn all_to_all_transposes_parts() {
    on_every_backend(|group| {
        let (rank, size) = (group.rank(), group.size());
        for count in [0, 1, 5, 3000, 70_001] {
            let part = |from: usize, to: usize| own(from * size + to, count);
            let input: Vec<u32> = (0..size).flat_map(|to| part(rank, to)).collect();
            let expected: Vec<u32> = (0..size).flat_map(|from| part(from, rank)).collect();
            let mut output = vec![0; input.len()];
            group.all_to_all(&input, &mut output).unwrap();
            assert!(output == expected, "{count}");
        }
    });
}

#[test]
fn all_to_all_takes_parts_of_any_size() {
    on_every_backend(|group: &dyn Communicator| {
        let (rank, size) = (group.rank(), group.size());
        let length = |from: usize, to: usize| (from * 3 + to * 5) % 4 * 40_000;
        let send: Vec<_> = (0..size).map(|to| length(rank, to)).collect();
        let receive: Vec<_> = (0..size).map(|from| length(from, rank)).collect();
        let part = |from: usize, to: usize| own(from * size + to, length(from, to));
        let input: Vec<u32> = (0..size).flat_map(|to| part(rank, to)).collect();
        let expected: Vec<u32> = (0..size).flat_map(|from| part(from, rank)).collect();
        let mut output = vec![0; expected.len()];
        group.all_to_all_v(&input, &mut output, &send, &receive).unwrap();
        assert!(output == expected);
    });
}

#[test]
fn tensors_of_every_dtype_are_gathered_reduced_and_broadcast() {
    use candle_core::{DType, Device, Tensor};
    use sconce_collectives::ReduceOp;
    on_every_backend(|group| {
        for dtype in [
            DType::U8,
            DType::U32,
            DType::I64,
            DType::F16,
            DType::BF16,
            DType::F32,
            DType::F64,
        ] {
            let size = group.size() as f64;
            let rank = group.rank() as f64;
            // A transposed view: rows and columns must not be mixed up.
            let base = Tensor::arange(0f64, 6.0, &Device::Cpu)
                .unwrap()
                .reshape((3, 2))
                .unwrap();
            let tensor = (base.t().unwrap() + rank).unwrap().to_dtype(dtype).unwrap();
            let numbers = |t: &Tensor| {
                t.to_dtype(DType::F64)
                    .unwrap()
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<f64>()
                    .unwrap()
            };
            let sum = group.all_reduce_tensor(&tensor, ReduceOp::Sum).unwrap();
            let ranks = size * (size - 1.0) / 2.0;
            let expected: Vec<f64> = [0.0, 2.0, 4.0, 1.0, 3.0, 5.0].map(|v| v * size + ranks).into();
            assert_eq!((sum.dims(), numbers(&sum), sum.dtype()), (&[2, 3][..], expected, dtype));
            let all = group.all_gather_tensor(&tensor).unwrap();
            assert_eq!(all.dims(), [2 * group.size(), 3]);
            let last = group.broadcast_tensor(&tensor, group.size() - 1).unwrap();
            assert_eq!(numbers(&last)[1], 2.0 + size - 1.0);
        }
        let shapes = group.all_gather_shapes(&Tensor::zeros(group.rank() + 1, DType::F32, &Device::Cpu).unwrap());
        assert_eq!(shapes.unwrap(), (1..=group.size()).map(|n| vec![n]).collect::<Vec<_>>());
    });
}
