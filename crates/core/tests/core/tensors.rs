//! Collectives on tensors: gather, reduce, broadcast, pad.

use super::{accelerator, on_ranks};
use candle_core::{DType, Device, Tensor};
use sconce_core::{Accelerator, ReduceOp};

const DTYPES: [DType; 7] = [
    DType::U8,
    DType::U32,
    DType::I64,
    DType::F16,
    DType::BF16,
    DType::F32,
    DType::F64,
];
const SHAPES: [&[usize]; 6] = [&[], &[1], &[5], &[3, 7], &[2, 3, 5], &[4, 1, 1, 3]];

/// Small whole numbers that depend on the rank, exact in every dtype.
fn tensor(rank: usize, shape: &[usize], dtype: DType) -> Tensor {
    let count: usize = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|i| ((i * 3 + rank * 5) % 13 + 1) as f64).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor
        .to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// Runs `rule` on every rank of worlds 1 to 4.
fn on_worlds(rule: impl Fn(&dyn Accelerator, usize) + Sync) {
    for world in 1..=4 {
        on_ranks(world, |communicator| rule(&*accelerator(communicator), world));
    }
}

#[test]
fn gather_joins_along_dimension_0_in_rank_order() {
    on_worlds(|acc, world| {
        for (shape, dtype) in SHAPES.iter().flat_map(|shape| DTYPES.map(|dtype| (*shape, dtype))) {
            let gathered = acc.gather(&tensor(acc.world().rank, shape, dtype)).unwrap();
            let expected: Vec<f64> = (0..world)
                .flat_map(|rank| numbers(&tensor(rank, shape, dtype)))
                .collect();
            let mut dims = shape.to_vec();
            if dims.is_empty() {
                dims.push(world);
            } else {
                dims[0] *= world;
            }
            assert_eq!((gathered.dims(), gathered.dtype()), (&dims[..], dtype));
            assert_eq!(numbers(&gathered), expected, "{shape:?} {dtype:?}");
        }
    });
}

#[test]
fn reduce_gives_every_rank_the_reduction() {
    let fold = |op: ReduceOp, values: &[f64]| match op {
        ReduceOp::Sum => values.iter().sum(),
        ReduceOp::Mean => values.iter().sum::<f64>() / values.len() as f64,
        ReduceOp::Min => values.iter().copied().fold(f64::INFINITY, f64::min),
        _ => values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
    };
    on_worlds(|acc, world| {
        for (shape, dtype) in SHAPES.iter().flat_map(|shape| DTYPES.map(|dtype| (*shape, dtype))) {
            let all: Vec<Vec<f64>> = (0..world).map(|rank| numbers(&tensor(rank, shape, dtype))).collect();
            for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Mean] {
                if op == ReduceOp::Mean && !dtype.is_float() {
                    continue;
                }
                let reduced = acc.reduce(&tensor(acc.world().rank, shape, dtype), op).unwrap();
                assert_eq!((reduced.dims(), reduced.dtype()), (shape, dtype));
                let precision = if matches!(dtype, DType::F16 | DType::BF16) {
                    4e-3
                } else {
                    1e-6
                };
                for (index, found) in numbers(&reduced).into_iter().enumerate() {
                    let expected = fold(op, &all.iter().map(|one| one[index]).collect::<Vec<_>>());
                    assert!(
                        (found - expected).abs() <= precision * expected,
                        "{op:?} {dtype:?}: {found} {expected}"
                    );
                }
            }
        }
    });
}

#[test]
fn broadcast_gives_every_rank_the_roots_tensor() {
    on_worlds(|acc, world| {
        for (root, dtype) in (0..world).flat_map(|root| DTYPES.map(|dtype| (root, dtype))) {
            for shape in SHAPES {
                let found = acc.broadcast(&tensor(acc.world().rank, shape, dtype), root).unwrap();
                assert_eq!((found.dims(), found.dtype()), (shape, dtype));
                assert_eq!(numbers(&found), numbers(&tensor(root, shape, dtype)));
            }
        }
    });
}

#[test]
fn tensors_that_are_views_are_taken_as_they_look_and_results_have_no_history() {
    on_worlds(|acc, world| {
        let whole = candle_core::Var::from_tensor(&tensor(acc.world().rank, &[4, 6], DType::F32)).unwrap();
        let view = whole.t().unwrap().narrow(0, 1, 3).unwrap();
        let gathered = acc.gather(&view).unwrap();
        assert_eq!(gathered.dims(), [3 * world, 4]);
        let own = gathered.narrow(0, 3 * acc.world().rank, 3).unwrap();
        assert_eq!(numbers(&own), numbers(&view));
        assert!(gathered.sorted_nodes().is_empty());
        assert!(acc.reduce(&view, ReduceOp::Sum).unwrap().sorted_nodes().is_empty());
    });
}

/// A call that goes wrong; the flag says whether this is rank 0.
type Case = fn(&dyn Accelerator, bool) -> sconce_core::Result<Tensor>;

#[test]
fn shapes_or_dtypes_that_differ_and_roots_that_are_no_rank_are_errors_on_every_rank() {
    let cases: [Case; 5] = [
        |acc, first| acc.gather(&tensor(0, if first { &[3] } else { &[4] }, DType::F32)),
        |acc, first| acc.gather(&tensor(0, &[3], if first { DType::F32 } else { DType::U32 })),
        |acc, first| acc.reduce(&tensor(0, if first { &[3] } else { &[4] }, DType::F32), ReduceOp::Sum),
        |acc, first| acc.broadcast(&tensor(0, &[3], if first { DType::F32 } else { DType::F64 }), 0),
        |acc, _| acc.broadcast(&tensor(0, &[3], DType::F32), acc.world().size),
    ];
    for world in 2..=4 {
        for case in cases {
            let outcomes = on_ranks(world, |communicator| {
                let acc = accelerator(communicator);
                case(&*acc, acc.is_main_process()).map(drop)
            });
            assert!(outcomes.iter().all(Result::is_err), "world {world}: {outcomes:?}");
        }
    }
}

#[test]
fn padding_fills_a_dimension_up_to_the_longest_on_any_rank() {
    on_worlds(|acc, world| {
        let rank = acc.world().rank;
        for dim in 0..3 {
            for dtype in DTYPES {
                let mut shape = [2, 3, 4];
                shape[dim] = 2 * rank + 1;
                let own = tensor(rank, &shape, dtype);
                let padded = acc.pad_across_processes(&own, dim, 7.0).unwrap();
                shape[dim] = 2 * world - 1;
                assert_eq!((padded.dims(), padded.dtype()), (&shape[..], dtype));
                let kept = padded.narrow(dim, 0, 2 * rank + 1).unwrap();
                assert_eq!(numbers(&kept), numbers(&own));
                let added = padded.narrow(dim, 2 * rank + 1, 2 * (world - 1 - rank)).unwrap();
                assert!(numbers(&added).iter().all(|value| *value == 7.0));
                assert_eq!(acc.gather(&padded).unwrap().dim(0).unwrap(), shape[0] * world);
            }
        }
    });
}

#[test]
fn a_rank_without_rows_is_padded_too_and_labels_can_be_padded_with_a_negative_number() {
    on_worlds(|acc, world| {
        let rank = acc.world().rank;
        let own = tensor(rank, &[rank, 2], DType::I64);
        let padded = acc.pad_across_processes(&own, 0, -100.0).unwrap();
        assert_eq!(padded.dims(), [world - 1, 2]);
        let mut expected = numbers(&own);
        expected.resize(2 * (world - 1), -100.0);
        assert_eq!(numbers(&padded), expected);
    });
}

#[test]
fn a_dimension_that_one_rank_lacks_is_an_error_on_every_rank_that_names_it() {
    for world in 2..=4 {
        let outcomes = on_ranks(world, |communicator| {
            let acc = accelerator(communicator);
            let shape: &[usize] = if acc.world().rank == 1 { &[3] } else { &[3, 2] };
            let failed = acc
                .pad_across_processes(&tensor(0, shape, DType::F32), 1, 0.0)
                .unwrap_err();
            // The group is still whole.
            acc.wait_for_everyone().unwrap();
            failed.to_string()
        });
        for text in outcomes {
            assert!(text.contains("rank 1 has shape [3]"), "{text}");
        }
    }
}

#[test]
fn debug_mode_lists_the_shapes_of_all_ranks_where_they_differ() {
    let of = |rank: usize| -> &[usize] { if rank == 0 { &[1, 5] } else { &[1, 1, 5] } };
    type Call = fn(&dyn Accelerator, &Tensor) -> sconce_core::Result<Tensor>;
    let calls: [Call; 4] = [
        |acc, tensor| acc.gather(tensor),
        |acc, tensor| acc.reduce(tensor, ReduceOp::Sum),
        |acc, tensor| acc.broadcast(tensor, 0),
        |acc, tensor| acc.pad_across_processes(tensor, 0, 0.0),
    ];
    for (call, name) in calls
        .into_iter()
        .zip(["gather", "reduce", "broadcast", "pad_across_processes"])
    {
        let outcomes = on_ranks(2, |communicator| {
            let plain = accelerator(communicator.clone());
            let own = tensor(plain.world().rank, of(plain.world().rank), DType::F32);
            // As many elements: without debug mode nothing is amiss.
            assert!(call(&*plain, &own).is_ok());
            let builder = sconce_core::AcceleratorBuilder::default().communicator(communicator);
            let lookup = |name: &str| (name == "ACCELERATE_DEBUG_MODE").then(|| "true".to_owned());
            let acc = builder.build_with(lookup).unwrap();
            assert!(call(&*acc, &tensor(0, &[2, 2], DType::F32)).is_ok());
            call(&*acc, &own).unwrap_err().to_string()
        });
        for text in outcomes {
            assert!(
                text.starts_with(name) && text.contains("rank 0: [1, 5], rank 1: [1, 1, 5]"),
                "{text}"
            );
        }
    }
}
