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
    let mut buffers = Buffers {
        values: [0.0; PIECE],
        gradient: [0.0; PIECE],
    };
    let (wide, wide_gradient) = (&mut buffers.values, &mut buffers.gradient);
    let whole = values.len() - values.len() % PIECE;
    for start in (0..whole).step_by(PIECE) {
        let mut state = state.each_mut().map(|array| {
            let piece: &mut [f32; PIECE] = (&mut array[start..start + PIECE])
                .try_into()
                .expect("a range of a piece's length");
            piece
        });
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
