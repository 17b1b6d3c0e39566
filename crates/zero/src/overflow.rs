//! Whether gradients are finite, before a step makes everything of them.
//!
//! Knowing it takes a pass over the gradients, which the norm has made already where they are clipped; so what is known
//! is kept until gradients come or change. All ranks know it or none does: they must agree on who asks the others.

use crate::Result;
use crate::bucket::Held;
use crate::device::Gpu;
use rayon::prelude::*;

/// Elements looked at by one task.
const BLOCK: usize = 1 << 16;
/// The bits of f32's infinity: above them are only numbers that are none, below them the finite ones.
const INFINITY: u32 = 0x7f80_0000;

/// What is known of the gradients held.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Finiteness {
    /// Whether those of all ranks are finite, if nothing has come since that was found.
    known: Option<bool>,
    /// Set when they have been clamped, after which infinities cannot be seen any more.
    is_clamped: bool,
    /// Whether this rank's had a value that was not finite when they were clamped.
    had_overflow: bool,
}

impl Finiteness {
    /// Returns what is known of all ranks' gradients.
    pub(crate) fn known(self) -> Option<bool> {
        self.known
    }

    /// Says whether this rank's gradients had a value that was not finite and that was clamped.
    pub(crate) fn had_overflow(self) -> bool {
        self.had_overflow
    }

    /// Forgets what holds only as long as nothing comes.
    pub(crate) fn gradients_come(&mut self) {
        self.known = None;
    }

    /// Takes note of what all ranks found.
    pub(crate) fn found(&mut self, finite: bool) {
        self.known = Some(finite);
    }

    /// Takes note of a norm of all ranks' gradients, which is finite if and only if all of them are.
    pub(crate) fn found_norm(&mut self, norm: f64) {
        if self.known.is_none() && !self.is_clamped {
            self.known = Some(norm.is_finite());
        }
    }

    /// Takes note of clamping, and of whether this rank's gradients were finite before.
    pub(crate) fn clamped(&mut self, finite: bool) {
        self.is_clamped = true;
        self.had_overflow |= !finite;
    }
}

/// Says whether the parts that belong to rank `rank` are finite; padding and slots without gradient do not count.
pub(crate) fn own_part_is_finite(rank: usize, buckets: &[Held<'_>], holds: &[bool], gpu: Option<&Gpu>) -> Result<bool> {
    let mut on_device = Vec::new();
    for bucket in buckets {
        for slot in bucket.layout.slots.iter().filter(|slot| holds[slot.parameter]) {
            if let Some(piece) = bucket.on_device(slot, rank) {
                on_device.push(piece);
            } else if !bucket.gradient(slot, rank).par_chunks(BLOCK).all(is_finite) {
                return Ok(false);
            }
        }
    }
    match gpu.filter(|_| !on_device.is_empty()) {
        Some(gpu) => gpu.are_finite(&on_device),
        None => Ok(true),
    }
}

/// Says whether all values are finite.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma", "aarch64+neon"))]
pub(crate) fn is_finite(values: &[f32]) -> bool {
    // The largest magnitude, as bits: a loop without a branch, which the compiler makes wide.
    let magnitudes = values.iter().map(|value| value.to_bits() & !(1 << 31));
    magnitudes.fold(0, u32::max) < INFINITY
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_that_is_not_finite_is_seen_at_every_place_and_the_largest_finite_ones_are_not() {
        let finite = [f32::MAX, -f32::MAX, f32::MIN_POSITIVE / 2.0, -0.0, 1.0];
        for size in 0..70 {
            let mut values: Vec<f32> = (0..size).map(|i| finite[i % finite.len()]).collect();
            assert!(is_finite(&values));
            for place in 0..size {
                for broken in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
                    let kept = std::mem::replace(&mut values[place], broken);
                    assert!(!is_finite(&values), "{broken} at {place} of {size}");
                    values[place] = kept;
                }
            }
        }
    }

    #[test]
    fn a_norm_says_nothing_of_gradients_that_were_clamped() {
        let mut finiteness = Finiteness::default();
        finiteness.clamped(false);
        finiteness.found_norm(1.0);
        assert_eq!(finiteness.known(), None);
        assert!(finiteness.had_overflow());
        finiteness = Finiteness::default();
        finiteness.found_norm(f64::INFINITY);
        finiteness.clamped(true);
        finiteness.found_norm(1.0);
        assert_eq!(finiteness.known(), Some(false));
        finiteness.gradients_come();
        assert_eq!(finiteness.known(), None);
    }
}
