//! The loop of all rules here: an update of one element, carried out over arrays of any form.
//!
//! Such a loop is as fast as memory only if nothing comes in between. A piece of a size that the compiler knows has no
//! remainder and no checks, values in a buffer of their own cannot overlap the state, and widening and rounding happen on
//! what never leaves the first-level cache. So one loop serves f32 and 16 bits. Measured by `cargo xtask bench
//! optimizer`.

use super::prefetch::{STRIDE, prefetch_after};
use super::{Gradient, Values};

/// Elements of a piece. In pieces of a quarter, what is done once in each costs a sixth of the time.
const PIECE: usize = 4 * STRIDE;

/// Begin with cache lines, as vectors do.
#[repr(align(64))]
struct Buffers {
    values: [f32; PIECE],
    gradient: [f32; PIECE],
}

/// Calls `element` with each value, its gradient and its elements of the state arrays.
///
/// To be inlined into a function that is compiled for an instruction set and has the state arrays as arguments: so the
/// compiler knows that they do not overlap.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub(super) fn for_each_element<const ARRAYS: usize>(
    mut values: Values<'_>,
    gradient: Gradient<'_>,
    mut state: [&mut [f32]; ARRAYS],
    element: impl Fn(&mut f32, f32, [&mut f32; ARRAYS]),
) {
    values.check_lengths(&gradient, state.iter().map(|array| array.len()));
    if let (Values::F32(values), Gradient::F32(gradient)) = (&mut values, &gradient) {
        return in_place(values, gradient, state, element);
    }
    let mut buffers = Buffers {
        values: [0.0; PIECE],
        gradient: [0.0; PIECE],
    };
    let (wide, wide_gradient) = (&mut buffers.values, &mut buffers.gradient);
    let whole = values.len() - values.len() % PIECE;
    for start in (0..whole).step_by(PIECE) {
        let mut state = state.each_mut().map(|array| piece_at::<PIECE>(array, start));
        values.read_at(start, wide);
        gradient.read_at(start, wide_gradient);
        for stride in (0..PIECE).step_by(STRIDE) {
            values.prefetch_after(start + stride..start + stride + STRIDE);
            gradient.prefetch_after(start + stride..start + stride + STRIDE);
            state
                .iter()
                .for_each(|array| prefetch_after(&array[stride..stride + STRIDE]));
            for index in stride..stride + STRIDE {
                let state = state.each_mut().map(|array| &mut array[index]);
                element(&mut wide[index], wide_gradient[index], state);
            }
        }
        values.write_at(start, wide);
    }
    let rest = values.len() - whole;
    let (wide, wide_gradient) = (&mut wide[..rest], &mut wide_gradient[..rest]);
    values.read_at(whole, wide);
    gradient.read_at(whole, wide_gradient);
    for (index, (value, gradient)) in wide.iter_mut().zip(wide_gradient).enumerate() {
        let state = state.each_mut().map(|array| &mut array[whole + index]);
        element(value, *gradient, state);
    }
    values.write_at(whole, wide);
}

/// The same for f32 values and gradients, which need no buffers: a quarter less time where memory is not the limit.
#[inline(always)]
fn in_place<const ARRAYS: usize>(
    values: &mut [f32],
    gradient: &[f32],
    mut state: [&mut [f32]; ARRAYS],
    element: impl Fn(&mut f32, f32, [&mut f32; ARRAYS]),
) {
    let (pieces, values) = values.as_chunks_mut::<STRIDE>();
    let (gradient_pieces, gradient) = gradient.as_chunks::<STRIDE>();
    let whole = pieces.len() * STRIDE;
    for (number, (values, gradient)) in pieces.iter_mut().zip(gradient_pieces).enumerate() {
        let mut state = state.each_mut().map(|array| piece_at::<STRIDE>(array, number * STRIDE));
        prefetch_after(values);
        prefetch_after(gradient);
        state.iter().for_each(|array| prefetch_after(&array[..]));
        for index in 0..STRIDE {
            let state = state.each_mut().map(|array| &mut array[index]);
            element(&mut values[index], gradient[index], state);
        }
    }
    for (index, (value, gradient)) in values.iter_mut().zip(gradient).enumerate() {
        let state = state.each_mut().map(|array| &mut array[whole + index]);
        element(value, *gradient, state);
    }
}

#[inline(always)]
fn piece_at<const SIZE: usize>(array: &mut [f32], start: usize) -> &mut [f32; SIZE] {
    let piece = &mut array[start..start + SIZE];
    piece.try_into().expect("the range has this size")
}
