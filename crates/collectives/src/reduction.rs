//! Reduction kernels: several inputs become one result, stored into one or several outputs.
//!
//! Inputs are combined in the order given, block by block, so that results do not depend on how callers cut the
//! buffers. A block is read completely before it is stored: outputs may be the inputs themselves. 16-bit floats are
//! combined in f32 and rounded once.

use crate::copy::{copy_past_cache, fence_past_cache, prefetch};
use crate::{ElementType, ReduceOp};
use half::{bf16, f16};
use multiversion::multiversion;

/// Elements combined at a time: the accumulator stays in the first-level cache.
const BLOCK: usize = 1024;

/// The addresses of several equally long ranges, by number.
#[derive(Clone, Copy)]
pub(crate) struct Ranges<'a, P> {
    pub(crate) count: usize,
    pub(crate) at: &'a dyn Fn(usize) -> P,
}

impl<'a, P> Ranges<'a, P> {
    pub(crate) fn new(count: usize, at: &'a dyn Fn(usize) -> P) -> Self {
        Self { count, at }
    }
}

/// Where results are likely to be when they are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Temperature {
    /// The output's lines are in cache, or soon will be.
    Warm,
    /// The output is large and not in cache: store past it, so that its lines need not be read first.
    Cold,
}

/// Reduces `count` elements of every input into every output.
///
/// # Safety
/// Every pointer is aligned for the element type and valid for `count` elements (inputs for reads, outputs for writes)
/// that nobody else writes (inputs) or touches (outputs) during the call. An output may equal an input; otherwise
/// ranges do not overlap.
pub(crate) unsafe fn reduce(
    element: ElementType,
    op: ReduceOp,
    inputs: Ranges<'_, *const u8>,
    outputs: Ranges<'_, *mut u8>,
    count: usize,
    temperature: Temperature,
) {
    macro_rules! dispatch {
        ($($tag:ident => $rust:ty),*) => {
            match element {
                $(ElementType::$tag => {
                    // SAFETY: the caller's promise, passed on.
                    unsafe { reduce_blocks::<$rust>(op, inputs, outputs, count, temperature) }
                })*
            }
        };
    }
    dispatch!(U8 => u8, U32 => u32, I64 => i64, F16 => f16, BF16 => bf16, F32 => f32, F64 => f64);
}

/// # Safety
/// As [`reduce`].
unsafe fn reduce_blocks<T: Accumulate>(
    op: ReduceOp,
    inputs: Ranges<'_, *const u8>,
    outputs: Ranges<'_, *mut u8>,
    count: usize,
    temperature: Temperature,
) {
    if inputs.count == 2 && op == ReduceOp::Sum {
        // SAFETY: the caller's promise, passed on.
        if unsafe { add_pair::<T>(inputs, outputs, count) } {
            return;
        }
    }
    let mut accumulator = [T::Wide::default(); BLOCK];
    let mut result = [T::default(); BLOCK];
    let mut at = 0;
    while at < count {
        let length = BLOCK.min(count - at);
        let (accumulator, result) = (&mut accumulator[..length], &mut result[..length]);
        let block = |number| {
            let start = (inputs.at)(number).cast::<T>().wrapping_add(at);
            // SAFETY: `at + length <= count`, and the caller vouches for `count` elements; nobody writes them now.
            unsafe { std::slice::from_raw_parts(start, length) }
        };
        T::load(accumulator, block(0));
        (1..inputs.count).for_each(|number| T::combine(op, accumulator, block(number)));
        if op == ReduceOp::Mean {
            T::divide(accumulator, inputs.count);
        }
        T::store(accumulator, result);
        for number in 0..outputs.count {
            let target = (outputs.at)(number).cast::<T>().wrapping_add(at).cast::<u8>();
            let bytes = size_of_val(result);
            let source = result.as_ptr().cast::<u8>();
            match temperature {
                // SAFETY: as above; no slice of this block's inputs is alive.
                Temperature::Warm => unsafe { std::ptr::copy_nonoverlapping(source, target, bytes) },
                // SAFETY: as above.
                Temperature::Cold => unsafe { copy_past_cache(source, target, bytes) },
            }
        }
        at += length;
    }
    if temperature == Temperature::Cold {
        fence_past_cache();
    }
}

/// Sums two inputs in one pass if the outputs are these inputs or one of them; says whether it did.
///
/// By far the commonest case. Which input comes first does not matter: a sum of two has the same bits either way.
///
/// # Safety
/// As [`reduce`].
unsafe fn add_pair<T: Accumulate>(inputs: Ranges<'_, *const u8>, outputs: Ranges<'_, *mut u8>, count: usize) -> bool {
    let [first, second] = [0, 1].map(|number| (inputs.at)(number).cast::<T>());
    let target = (outputs.at)(0).cast::<T>();
    let both = outputs.count == 2 && target.cast_const() == first && (outputs.at)(1).cast_const().cast::<T>() == second;
    if both {
        // SAFETY: `count` elements that are an output, so nobody else touches them now.
        let a = unsafe { std::slice::from_raw_parts_mut(target, count) };
        // SAFETY: as above; ranges that are not equal do not overlap.
        let b = unsafe { std::slice::from_raw_parts_mut((outputs.at)(1).cast::<T>(), count) };
        T::add_both(a, b);
        return true;
    }
    let other = match target.cast_const() {
        own if own == first => second,
        own if own == second => first,
        _ => return false,
    };
    if outputs.count != 1 || other == target.cast_const() {
        return false;
    }
    // SAFETY: `count` elements that are an output, so nobody else touches them now.
    let sum = unsafe { std::slice::from_raw_parts_mut(target, count) };
    // SAFETY: an input that nobody writes; it is not the output, so the two do not overlap.
    let other = unsafe { std::slice::from_raw_parts(other, count) };
    T::add(sum, other);
    true
}

/// A type that can be reduced block by block in a (possibly wider) accumulator.
trait Accumulate: Copy + Default {
    type Wide: Copy + Default;
    /// Adds `other` to `sum`, rounded once.
    fn add(sum: &mut [Self], other: &[Self]);
    /// Makes both the sum of the two, rounded once.
    fn add_both(first: &mut [Self], second: &mut [Self]);
    fn load(accumulator: &mut [Self::Wide], block: &[Self]);
    fn combine(op: ReduceOp, accumulator: &mut [Self::Wide], block: &[Self]);
    fn divide(accumulator: &mut [Self::Wide], divisor: usize);
    fn store(accumulator: &[Self::Wide], block: &mut [Self]);
}

macro_rules! accumulate_native {
    ($($rust:ty, $module:ident, $add:expr, $multiply:expr, $minimum:expr, $maximum:expr, $divide:expr;)*) => {$(
        mod $module {
            use super::*;

            #[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
            pub(super) fn add(sum: &mut [$rust], other: &[$rust]) {
                for (sum, other) in sum.chunks_mut(ahead::<$rust>()).zip(other.chunks(ahead::<$rust>())) {
                    prefetch_ahead(sum);
                    prefetch_ahead(other);
                    sum.iter_mut().zip(other).for_each(|(a, b)| *a = ($add)(*a, *b));
                }
            }

            #[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
            pub(super) fn add_both(first: &mut [$rust], second: &mut [$rust]) {
                for (first, second) in first.chunks_mut(ahead::<$rust>()).zip(second.chunks_mut(ahead::<$rust>())) {
                    prefetch_ahead(first);
                    prefetch_ahead(second);
                    for (a, b) in first.iter_mut().zip(second) {
                        let sum = ($add)(*a, *b);
                        *a = sum;
                        *b = sum;
                    }
                }
            }

            #[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
            pub(super) fn combine(op: ReduceOp, accumulator: &mut [$rust], block: &[$rust]) {
                match op {
                    ReduceOp::Sum | ReduceOp::Mean => accumulator.iter_mut().zip(block).for_each(|(a, b)| *a = ($add)(*a, *b)),
                    ReduceOp::Product => accumulator.iter_mut().zip(block).for_each(|(a, b)| *a = ($multiply)(*a, *b)),
                    ReduceOp::Min => accumulator.iter_mut().zip(block).for_each(|(a, b)| *a = ($minimum)(*a, *b)),
                    ReduceOp::Max => accumulator.iter_mut().zip(block).for_each(|(a, b)| *a = ($maximum)(*a, *b)),
                }
            }
        }

        impl Accumulate for $rust {
            type Wide = $rust;
            fn add(sum: &mut [$rust], other: &[$rust]) {
                $module::add(sum, other);
            }
            fn add_both(first: &mut [$rust], second: &mut [$rust]) {
                $module::add_both(first, second);
            }
            fn load(accumulator: &mut [$rust], block: &[$rust]) {
                accumulator.copy_from_slice(block);
            }
            fn combine(op: ReduceOp, accumulator: &mut [$rust], block: &[$rust]) {
                $module::combine(op, accumulator, block);
            }
            fn divide(accumulator: &mut [$rust], divisor: usize) {
                accumulator.iter_mut().for_each(|value| *value = ($divide)(*value, divisor as $rust));
            }
            fn store(accumulator: &[$rust], block: &mut [$rust]) {
                block.copy_from_slice(accumulator);
            }
        }
    )*};
}

macro_rules! nan_aware {
    ($rust:ty, $compare:tt) => {
        |a: $rust, b: $rust| if a.is_nan() || a $compare b { a } else { b }
    };
}

accumulate_native! {
    u8, bytes, u8::wrapping_add, u8::wrapping_mul, |a: u8, b: u8| a.min(b), |a: u8, b: u8| a.max(b), |a: u8, n: u8| a / n.max(1);
    u32, words, u32::wrapping_add, u32::wrapping_mul, |a: u32, b: u32| a.min(b), |a: u32, b: u32| a.max(b), |a: u32, n: u32| a / n;
    i64, longs, i64::wrapping_add, i64::wrapping_mul, |a: i64, b: i64| a.min(b), |a: i64, b: i64| a.max(b), |a: i64, n: i64| a / n;
    f32, singles, |a: f32, b: f32| a + b, |a: f32, b: f32| a * b, nan_aware!(f32, <), nan_aware!(f32, >), |a: f32, n: f32| a / n;
    f64, doubles, |a: f64, b: f64| a + b, |a: f64, b: f64| a * b, nan_aware!(f64, <), nan_aware!(f64, >), |a: f64, n: f64| a / n;
}

macro_rules! accumulate_half {
    ($($rust:ty, $widen:path, $combine:path, $narrow:path, $add:path, $add_both:path;)*) => {$(
        impl Accumulate for $rust {
            type Wide = f32;
            fn add(sum: &mut [$rust], other: &[$rust]) {
                $add(sum, other);
            }
            fn add_both(first: &mut [$rust], second: &mut [$rust]) {
                $add_both(first, second);
            }
            fn load(accumulator: &mut [f32], block: &[$rust]) {
                $widen(block, accumulator);
            }
            fn combine(op: ReduceOp, accumulator: &mut [f32], block: &[$rust]) {
                $combine(op, accumulator, block);
            }
            fn divide(accumulator: &mut [f32], divisor: usize) {
                f32::divide(accumulator, divisor);
            }
            fn store(accumulator: &[f32], block: &mut [$rust]) {
                $narrow(accumulator, block);
            }
        }
    )*};
}
accumulate_half! {
    bf16, widen_bf16, combine_bf16, narrow_bf16, add_bf16, add_both_bf16;
    f16, widen_f16, combine_f16, narrow_f16, add_f16, add_both_f16;
}

#[inline(always)]
fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
fn widen_bf16(block: &[bf16], wide: &mut [f32]) {
    wide.iter_mut()
        .zip(block)
        .for_each(|(wide, value)| *wide = bf16_to_f32(*value));
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
fn combine_bf16(op: ReduceOp, accumulator: &mut [f32], block: &[bf16]) {
    let pairs = accumulator
        .iter_mut()
        .zip(block.iter().map(|value| bf16_to_f32(*value)));
    match op {
        ReduceOp::Sum | ReduceOp::Mean => pairs.for_each(|(a, b)| *a += b),
        ReduceOp::Product => pairs.for_each(|(a, b)| *a *= b),
        ReduceOp::Min => pairs.for_each(|(a, b)| *a = (nan_aware!(f32, <))(*a, b)),
        ReduceOp::Max => pairs.for_each(|(a, b)| *a = (nan_aware!(f32, >))(*a, b)),
    }
}

/// Rounds to nearest, ties to even, as IEEE 754 and every bf16 unit do; NaN stays NaN.
#[inline(always)]
fn f32_to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let quiet = (bits >> 16) as u16 | 0x0040;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded })
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
fn narrow_bf16(wide: &[f32], block: &mut [bf16]) {
    block
        .iter_mut()
        .zip(wide)
        .for_each(|(value, wide)| *value = f32_to_bf16(*wide));
}

fn add_bf16(sum: &mut [bf16], other: &[bf16]) {
    match (bytemuck::try_cast_slice_mut(sum), bytemuck::try_cast_slice(other)) {
        (Ok(sum), Ok(other)) => add_bf16_pairs(sum, other),
        _ => add_bf16_singly(sum, other),
    }
}

fn add_both_bf16(first: &mut [bf16], second: &mut [bf16]) {
    match (
        bytemuck::try_cast_slice_mut(first),
        bytemuck::try_cast_slice_mut(second),
    ) {
        (Ok(first), Ok(second)) => add_both_bf16_pairs(first, second),
        _ => {
            add_bf16_singly(first, second);
            second.copy_from_slice(first);
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
fn add_bf16_singly(sum: &mut [bf16], other: &[bf16]) {
    let add = |a: bf16, b: bf16| f32_to_bf16(bf16_to_f32(a) + bf16_to_f32(b));
    sum.iter_mut().zip(other).for_each(|(a, b)| *a = add(*a, *b));
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
fn add_bf16_pairs(sum: &mut [u32], other: &[u32]) {
    for (sum, other) in sum.chunks_mut(ahead::<u32>()).zip(other.chunks(ahead::<u32>())) {
        prefetch_ahead(sum);
        prefetch_ahead(other);
        sum.iter_mut().zip(other).for_each(|(a, b)| *a = add_bf16_pair(*a, *b));
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
fn add_both_bf16_pairs(first: &mut [u32], second: &mut [u32]) {
    for (first, second) in first.chunks_mut(ahead::<u32>()).zip(second.chunks_mut(ahead::<u32>())) {
        prefetch_ahead(first);
        prefetch_ahead(second);
        for (a, b) in first.iter_mut().zip(second) {
            let sum = add_bf16_pair(*a, *b);
            *a = sum;
            *b = sum;
        }
    }
}

/// Returns the number of elements between two prefetches: 256 bytes.
const fn ahead<T>() -> usize {
    256 / size_of::<T>()
}

/// Asks for the lines eight pieces ahead: arithmetic and cache misses to other cores leave too few loads in flight.
#[inline(always)]
fn prefetch_ahead<T>(piece: &[T]) {
    prefetch(piece.as_ptr().wrapping_add(8 * piece.len()).cast(), size_of_val(piece));
}

/// Adds two bf16 in each word: half the widening and packing of one by one.
#[inline(always)]
fn add_bf16_pair(a: u32, b: u32) -> u32 {
    const HIGH: u32 = 0xffff_0000;
    // A NaN that comes out of an addition is quiet, and the lower halves of the summands are zero: rounding it up
    // carries nothing into its upper half, so it needs no case of its own.
    let round = |sum: f32| sum.to_bits().wrapping_add(0x7fff + ((sum.to_bits() >> 16) & 1));
    let low = round(f32::from_bits(a << 16) + f32::from_bits(b << 16));
    let high = round(f32::from_bits(a & HIGH) + f32::from_bits(b & HIGH));
    (high & HIGH) | (low >> 16)
}

fn add_f16(sum: &mut [f16], other: &[f16]) {
    let mut wide = [0f32; BLOCK];
    for (sum, other) in sum.chunks_mut(BLOCK).zip(other.chunks(BLOCK)) {
        let wide = &mut wide[..sum.len()];
        widen_f16(sum, wide);
        combine_f16(ReduceOp::Sum, wide, other);
        narrow_f16(wide, sum);
    }
}

fn add_both_f16(first: &mut [f16], second: &mut [f16]) {
    for (first, second) in first.chunks_mut(BLOCK).zip(second.chunks_mut(BLOCK)) {
        add_f16(first, second);
        second.copy_from_slice(first);
    }
}

fn widen_f16(block: &[f16], wide: &mut [f32]) {
    use half::slice::HalfFloatSliceExt;
    block.convert_to_f32_slice(wide);
}

fn combine_f16(op: ReduceOp, accumulator: &mut [f32], block: &[f16]) {
    let mut wide = [0f32; BLOCK];
    let wide = &mut wide[..block.len()];
    widen_f16(block, wide);
    f32::combine(op, accumulator, wide);
}

fn narrow_f16(wide: &[f32], block: &mut [f16]) {
    use half::slice::HalfFloatSliceExt;
    block.convert_from_f32_slice(wide);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Element;

    fn check<T: Element + PartialEq + std::fmt::Debug>(op: ReduceOp, inputs: &[Vec<T>], expected: &[T]) {
        let mut outputs = [inputs[0].clone(), inputs[0].clone()];
        let count = expected.len();
        let targets: Vec<_> = outputs
            .iter_mut()
            .map(|output| output.as_mut_ptr().cast::<u8>())
            .collect();
        let source = |number: usize| inputs[number].as_ptr().cast::<u8>();
        let target = |number: usize| targets[number];
        let (sources, targets) = (Ranges::new(inputs.len(), &source), Ranges::new(2, &target));
        // SAFETY: all vectors hold `count` elements and are exclusively ours.
        unsafe { reduce(T::TYPE, op, sources, targets, count, Temperature::Warm) };
        assert_eq!(outputs[0], expected, "{op:?}");
        assert_eq!(outputs[1], expected, "{op:?}");
    }

    #[test]
    fn a_sum_of_f32_adds_in_the_order_given() {
        let inputs: Vec<Vec<f32>> = (0..3)
            .map(|r| (0..2500).map(|i| 1.0 / (i + r + 1) as f32).collect())
            .collect();
        let expected: Vec<f32> = (0..2500).map(|i| inputs[0][i] + inputs[1][i] + inputs[2][i]).collect();
        check(ReduceOp::Sum, &inputs, &expected);
    }

    #[test]
    fn sixteen_bit_sums_accumulate_in_f32_and_round_once() {
        // In bf16 alone 256 + 1 stays 256; three times one in f32 first gives 259, rounded to 260.
        let inputs: Vec<_> = [256.0, 1.0, 1.0, 1.0].map(|v| vec![bf16::from_f32(v); 5]).into();
        check(ReduceOp::Sum, &inputs, &[bf16::from_f32(259.0); 5]);
        let inputs: Vec<_> = [2048.0, 1.0, 1.0, 1.0].map(|v| vec![f16::from_f32(v); 5]).into();
        check(ReduceOp::Sum, &inputs, &[f16::from_f32(2051.0); 5]);
    }

    #[test]
    fn rounding_to_bf16_equals_that_of_the_half_crate_for_all_exponents() {
        let values: Vec<f32> = (0..=u16::MAX)
            .flat_map(|high| {
                [0x0000, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low: u32| f32::from_bits(u32::from(high) << 16 | low))
            })
            .collect();
        let mut ours = vec![bf16::ZERO; values.len()];
        narrow_bf16(&values, &mut ours);
        for (value, ours) in values.iter().zip(&ours) {
            assert_eq!(
                ours.to_bits(),
                bf16::from_f32(*value).to_bits(),
                "{value:e} ({:#x})",
                value.to_bits()
            );
        }
    }

    #[test]
    fn minimum_and_maximum_propagate_nan_from_any_rank() {
        for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            for op in [ReduceOp::Min, ReduceOp::Max] {
                let mut output = [0f32];
                let values = [a, b];
                let source = |number: usize| (&raw const values[number]).cast();
                let sources = Ranges::new(2, &source);
                let target = output.as_mut_ptr().cast();
                // SAFETY: one element each, ours alone.
                unsafe {
                    reduce(
                        ElementType::F32,
                        op,
                        sources,
                        Ranges::new(1, &|_| target),
                        1,
                        Temperature::Cold,
                    );
                };
                assert!(output[0].is_nan());
            }
        }
    }

    #[test]
    fn integers_reduce_exactly() {
        let inputs = vec![vec![3i64, -7, i64::MAX], vec![5, 2, 1]];
        check(ReduceOp::Sum, &inputs, &[8, -5, i64::MIN]);
        check(ReduceOp::Product, &inputs, &[15, -14, i64::MAX]);
        check(ReduceOp::Min, &inputs, &[3, -7, 1]);
        check(ReduceOp::Max, &inputs, &[5, 2, i64::MAX]);
    }
}
