//! Rules that know f32 only, on values of any form: pieces that stay in the cache are widened, updated and rounded back.

use super::instruction_sets::for_each_instruction_set;
use super::{Gradient, StateSlices, Values};

/// Elements of a piece: with the rule's state some 20 KiB, for the first-level cache; and long enough for what a rule
/// computes once in every call.
const PIECE: usize = 1024;

/// A rule's update of f32 pieces.
type Piecewise<'a> = dyn Fn(&mut [f32], &[f32], StateSlices<'_>) + 'a;

for_each_instruction_set! {
    /// Calls `update` with f32 pieces of all arrays, in order; f32 alone goes whole.
    ///
    /// # Panics
    /// If the lengths differ; a state array may also be empty.
    pub(super) fn in_pieces(
        values: Values<'_>,
        gradient: Gradient<'_>,
        state: StateSlices<'_>,
        update: &Piecewise<'_>,
    ) {
        let kept = state.0.iter().map(|array| array.len()).filter(|length| *length > 0);
        values.check_lengths(&gradient, kept);
        let (mut values, gradient) = match (values, gradient) {
            (Values::F32(values), Gradient::F32(gradient)) => return update(values, gradient, state),
            mixed => mixed,
        };
        let (mut wide, mut wide_gradient) = ([0.0; PIECE], [0.0; PIECE]);
        for (start, state) in (0..values.len()).step_by(PIECE).zip(state.chunks(PIECE)) {
            let size = PIECE.min(values.len() - start);
            let (wide, wide_gradient) = (&mut wide[..size], &mut wide_gradient[..size]);
            values.read_at(start, wide);
            gradient.read_at(start, wide_gradient);
            update(wide, wide_gradient, state);
            values.write_at(start, wide);
        }
    }
}
