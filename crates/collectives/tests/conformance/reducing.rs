//! Reductions equal a plain loop in rank order, on every path (small, staged, in place).

use crate::{SIZES, is_rank_of_job, on_every_backend, over_nccl, value};
use half::{bf16, f16};
use sconce_collectives::{Communicator, Counts, Element, ReduceOp};

trait Number: Element + PartialEq + std::fmt::Debug {
    /// Largest difference, relative to the larger of 1 and the value, that roundings in another order may make.
    const ROUNDING: f64;
    fn of(value: usize) -> Self;
    fn wide(self) -> f64;
    /// Reduces in rank order as documented: 16-bit floats in f32, rounded once.
    fn reduce(op: ReduceOp, values: &[Self]) -> Self;
}

macro_rules! number {
    ($($rust:ty, $wide:ty, $to:expr, $from:expr, $mean:expr, $rounding:expr;)*) => {$(
        impl Number for $rust {
            const ROUNDING: f64 = $rounding;
            fn of(value: usize) -> Self {
                ($from)(value as $wide)
            }
            fn wide(self) -> f64 {
                ($to)(self) as f64
            }
            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let wide = values.iter().map(|value| ($to)(*value));
                let combine = |a: $wide, b: $wide| match op {
                    ReduceOp::Sum | ReduceOp::Mean => a + b,
                    ReduceOp::Product => a * b,
                    ReduceOp::Min => if b < a { b } else { a },
                    ReduceOp::Max => if b > a { b } else { a },
                };
                let result: $wide = wide.reduce(combine).expect("at least one rank");
                ($from)(if op == ReduceOp::Mean { ($mean)(result, values.len()) } else { result })
            }
        }
    )*};
}
number! {
    u8, u32, |v: u8| u32::from(v), |v: u32| v as u8, |_, _| unreachable!(), 0.0;
    u32, u32, |v| v, |v| v, |_, _| unreachable!(), 0.0;
    i64, i64, |v| v, |v| v, |_, _| unreachable!(), 0.0;
    f32, f32, |v| v, |v| v, |v, n| v / n as f32, 1e-6;
    f64, f64, |v| v, |v| v, |v, n| v / n as f64, 8.0 * f64::EPSILON;
    bf16, f32, |v: bf16| v.to_f32(), bf16::from_f32, |v, n| v / n as f32, 1.0 / 32.0;
    f16, f32, |v: f16| v.to_f32(), f16::from_f32, |v, n| v / n as f32, 1.0 / 256.0;
}

fn expected<T: Number>(op: ReduceOp, ranks: usize, count: usize) -> Vec<T> {
    let at = |index| {
        T::reduce(
            op,
            &(0..ranks).map(|rank| T::of(value(rank, index))).collect::<Vec<_>>(),
        )
    };
    (0..count).map(at).collect()
}

fn own<T: Number>(group: &dyn Communicator, count: usize) -> Vec<T> {
    (0..count).map(|index| T::of(value(group.rank(), index))).collect()
}

fn ops<T: Number>() -> impl Iterator<Item = ReduceOp> {
    ReduceOp::ALL
        .into_iter()
        .filter(|op| *op != ReduceOp::Mean || T::TYPE.is_float())
}

/// Says whether values are as expected: bit for bit, or within rounding where the order of additions is not ours.
fn agree<T: Number>(group: &dyn Communicator, values: &[T], expected: &[T]) -> bool {
    if !over_nccl::rounds_otherwise(group) {
        return values == expected;
    }
    let close = |(value, expected): (&T, &T)| {
        let (value, expected) = (value.wide(), expected.wide());
        (value - expected).abs() <= T::ROUNDING * expected.abs().max(1.0)
    };
    values.len() == expected.len() && values.iter().zip(expected).all(close)
}

fn check_all_operations<T: Number>(group: &dyn Communicator, op: ReduceOp, count: usize) {
    let (rank, size) = (group.rank(), group.size());
    let whole = expected::<T>(op, size, count);
    let what = format!("{} of {count} {} on rank {rank} of {size}", op.name(), T::TYPE.name());

    let mut buffer = own::<T>(group, count);
    group.all_reduce(&mut buffer, op).unwrap();
    assert!(agree(group, &buffer, &whole), "all_reduce {what}");

    let mut shared = group.allocate_elements::<T>(count + 3).unwrap();
    let part = &mut shared.as_mut_slice::<T>()[3..3 + count];
    part.copy_from_slice(&own::<T>(group, count));
    group.all_reduce(part, op).unwrap();
    assert!(agree(group, part, &whole), "all_reduce in a region, {what}");

    let root = size - 1;
    let mut buffer = own::<T>(group, count);
    group.reduce(&mut buffer, op, root).unwrap();
    let kept = if rank == root {
        whole.clone()
    } else {
        own::<T>(group, count)
    };
    assert!(agree(group, &buffer, &kept), "reduce {what}");

    let share = count / size;
    let mut output = vec![T::of(0); share];
    group
        .reduce_scatter(&own::<T>(group, count)[..share * size], &mut output, op)
        .unwrap();
    assert!(
        agree(group, &output, &whole[rank * share..][..share]),
        "reduce_scatter {what}"
    );

    let counts = uneven(count, size);
    let start: usize = counts[..rank].iter().sum();
    let mut output = vec![T::of(0); counts[rank]];
    group
        .reduce_scatter_v(&own::<T>(group, count), &mut output, &counts, op)
        .unwrap();
    assert!(
        agree(group, &output, &whole[start..][..counts[rank]]),
        "reduce_scatter_v {what}"
    );

    part.copy_from_slice(&own::<T>(group, count));
    let mut private = own::<T>(group, count);
    let mut in_place = own::<T>(group, count);
    in_place[start..][..counts[rank]].copy_from_slice(&whole[start..][..counts[rank]]);
    for buffer in [part, &mut private[..]] {
        group
            .reduce_scatter_in_place(buffer, Counts::Each(&counts), op)
            .unwrap();
        assert!(agree(group, buffer, &in_place), "reduce_scatter_in_place {what}");
    }
}

/// Deals `count` out unevenly; some ranks get nothing when there is little.
pub(crate) fn uneven(count: usize, size: usize) -> Vec<usize> {
    let mut counts: Vec<_> = (0..size).map(|rank| count * (rank % 3) / (2 * size)).collect();
    counts[size / 2] += count - counts.iter().sum::<usize>();
    counts
}

macro_rules! reduces {
    ($($name:ident: $rust:ty),*) => {$(
        #[test]
        fn $name() {
            on_every_backend(|group| {
                for count in SIZES {
                    for op in ops::<$rust>() {
                        check_all_operations::<$rust>(group, op, count);
                    }
                }
            });
        }
    )*};
}
reduces! {
    u8_reduces_as_a_plain_loop: u8,
    u32_reduces_as_a_plain_loop: u32,
    i64_reduces_as_a_plain_loop: i64,
    f32_reduces_as_a_plain_loop: f32,
    f64_reduces_as_a_plain_loop: f64,
    bf16_reduces_as_a_plain_loop_in_f32: bf16,
    f16_reduces_as_a_plain_loop_in_f32: f16
}

#[test]
fn inexact_sums_have_the_same_bits_on_every_rank_path_and_run() {
    use std::sync::Mutex;
    /// Ranks, and what else the order depends on.
    type Order = (usize, usize);
    let seen: Mutex<Vec<(Order, Vec<u32>)>> = Mutex::new(Vec::new());
    let run = |group: &dyn Communicator| {
        let values = |count: usize| -> Vec<f32> {
            (0..count)
                .map(|i| ((i * 31 + group.rank() * 17) as f32).sin() * 1e3 + 0.1)
                .collect()
        };
        // The first 1000 elements must not depend on how long the buffer is, hence which path it takes.
        for count in [1000, 50_000, 300_000] {
            let mut private = values(count);
            group.all_reduce(&mut private, ReduceOp::Sum).unwrap();
            let mut shared = group.allocate_elements::<f32>(count).unwrap();
            shared.as_mut_slice::<f32>().copy_from_slice(&values(count));
            group.all_reduce(shared.as_mut_slice::<f32>(), ReduceOp::Sum).unwrap();
            assert_eq!(private, shared.as_slice::<f32>());
            let bits = private[..1000].iter().map(|value| value.to_bits()).collect();
            // NCCL's order depends on the length, and on nothing else that changes here.
            let order = if over_nccl::rounds_otherwise(group) { count } else { 0 };
            seen.lock().unwrap().push(((group.size(), order), bits));
        }
    };
    on_every_backend(run);
    on_every_backend(run);
    let seen = seen.into_inner().unwrap();
    for size in 1..=4 {
        // A rank of a job may not be one of so many, or there are not as many.
        assert!(
            is_rank_of_job() || seen.iter().any(|((n, _), _)| *n == size),
            "every size ran"
        );
    }
    for (order, bits) in &seen {
        assert!(seen.iter().all(|(other, of)| other != order || of == bits), "{order:?}");
    }
}
