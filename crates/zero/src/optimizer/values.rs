//! The forms in which a step finds a parameter and its gradient: f32, 16 bits, or 16 bits with an f32 master.
//!
//! An enum, not a type parameter: which form it is comes from a tensor's type at run time, and rules are trait objects.

use super::prefetch::prefetch_after;
use super::rounding;
use half::{bf16, f16};
use std::ops::Range;

/// A piece of a parameter's values, to be updated.
#[derive(Debug)]
pub enum Values<'a> {
    /// f32 values, which are their own masters.
    F32(&'a mut [f32]),
    /// f32 masters and their rounded copy, of the same length. What the copy held before is not read.
    Masters {
        /// The values that are updated.
        masters: &'a mut [f32],
        /// The copy that the model computes with.
        copy: HalfMut<'a>,
    },
    /// 16-bit values without masters: every step ends with a rounding, and a change of less than half a unit in a
    /// value's last place is lost.
    Half(HalfMut<'a>),
}

/// A piece of a 16-bit array, to be written.
#[derive(Debug)]
pub enum HalfMut<'a> {
    /// The upper half of an f32.
    Bf16(&'a mut [bf16]),
    /// IEEE half precision.
    F16(&'a mut [f16]),
}

/// A piece of a parameter's gradient.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// Used as it is.
    F32(&'a [f32]),
    /// Widened, which is exact.
    Bf16(&'a [bf16]),
    /// Widened, which is exact.
    F16(&'a [f16]),
}

impl<'a> Values<'a> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Masters { masters, .. } => masters.len(),
            Self::Half(values) => values.len(),
        }
    }

    /// Tells whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns pieces of `size` elements, the last one of what is left.
    ///
    /// # Panics
    /// If `size` is 0, or a copy not as long as its masters.
    pub fn chunks(self, size: usize) -> impl Iterator<Item = Values<'a>> {
        assert!(size > 0, "pieces have elements");
        self.check_copy();
        let mut rest = self;
        std::iter::from_fn(move || {
            let size = size.min(rest.len());
            (size > 0).then(|| rest.take_front(size))
        })
    }

    /// Panics unless gradient, state arrays of these lengths and a copy are as long as the values.
    pub(super) fn check_lengths(&self, gradient: &Gradient<'_>, state: impl Iterator<Item = usize>) {
        self.check_copy();
        assert_eq!(gradient.len(), self.len(), "a gradient is as long as its values");
        for length in state {
            assert_eq!(length, self.len(), "a state array is as long as its values");
        }
    }

    fn check_copy(&self) {
        if let Self::Masters { masters, copy } = self {
            assert_eq!(copy.len(), masters.len(), "a copy is as long as its masters");
        }
    }

    /// Writes the values from `start` on, or their masters, in f32.
    #[inline(always)]
    pub(super) fn read_at(&self, start: usize, wide: &mut [f32]) {
        let piece = start..start + wide.len();
        match self {
            Self::F32(values) | Self::Masters { masters: values, .. } => wide.copy_from_slice(&values[piece]),
            Self::Half(HalfMut::Bf16(values)) => rounding::widen_bf16(&values[piece], wide),
            Self::Half(HalfMut::F16(values)) => rounding::widen_f16(&values[piece], wide),
        }
    }

    /// Sets the values from `start` on, rounded to their type.
    #[inline(always)]
    pub(super) fn write_at(&mut self, start: usize, wide: &[f32]) {
        let piece = start..start + wide.len();
        let half = match self {
            Self::F32(values) => return values[piece].copy_from_slice(wide),
            Self::Masters { masters, copy } => {
                masters[piece.clone()].copy_from_slice(wide);
                copy
            }
            Self::Half(half) => half,
        };
        match half {
            HalfMut::Bf16(values) => rounding::round_to_bf16(wide, &mut values[piece]),
            HalfMut::F16(values) => rounding::round_to_f16(wide, &mut values[piece]),
        }
    }

    /// Asks for the elements some way after these.
    #[inline(always)]
    pub(super) fn prefetch_after(&self, piece: Range<usize>) {
        let half = match self {
            Self::F32(values) => return prefetch_after(&values[piece]),
            Self::Masters { masters, copy } => {
                prefetch_after(&masters[piece.clone()]);
                copy
            }
            Self::Half(half) => half,
        };
        match half {
            HalfMut::Bf16(values) => prefetch_after(&values[piece]),
            HalfMut::F16(values) => prefetch_after(&values[piece]),
        }
    }

    fn take_front(&mut self, size: usize) -> Self {
        match self {
            Self::F32(values) => Self::F32(front_mut(values, size)),
            Self::Masters { masters, copy } => Self::Masters {
                masters: front_mut(masters, size),
                copy: copy.take_front(size),
            },
            Self::Half(values) => Self::Half(values.take_front(size)),
        }
    }
}

impl<'a> HalfMut<'a> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::Bf16(values) => values.len(),
            Self::F16(values) => values.len(),
        }
    }

    /// Tells whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn take_front(&mut self, size: usize) -> Self {
        match self {
            Self::Bf16(values) => Self::Bf16(front_mut(values, size)),
            Self::F16(values) => Self::F16(front_mut(values, size)),
        }
    }
}

impl<'a> Gradient<'a> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::F16(values) => values.len(),
        }
    }

    /// Tells whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns pieces of `size` elements, the last one of what is left.
    ///
    /// # Panics
    /// If `size` is 0.
    pub fn chunks(self, size: usize) -> impl Iterator<Item = Gradient<'a>> {
        assert!(size > 0, "pieces have elements");
        let mut rest = self;
        std::iter::from_fn(move || {
            let size = size.min(rest.len());
            (size > 0).then(|| rest.take_front(size))
        })
    }

    /// Writes the gradient from `start` on in f32.
    #[inline(always)]
    pub(super) fn read_at(&self, start: usize, wide: &mut [f32]) {
        let piece = start..start + wide.len();
        match self {
            Self::F32(values) => wide.copy_from_slice(&values[piece]),
            Self::Bf16(values) => rounding::widen_bf16(&values[piece], wide),
            Self::F16(values) => rounding::widen_f16(&values[piece], wide),
        }
    }

    /// Asks for the elements some way after these.
    #[inline(always)]
    pub(super) fn prefetch_after(&self, piece: Range<usize>) {
        match self {
            Self::F32(values) => prefetch_after(&values[piece]),
            Self::Bf16(values) => prefetch_after(&values[piece]),
            Self::F16(values) => prefetch_after(&values[piece]),
        }
    }

    fn take_front(&mut self, size: usize) -> Self {
        match self {
            Self::F32(values) => Self::F32(front(values, size)),
            Self::Bf16(values) => Self::Bf16(front(values, size)),
            Self::F16(values) => Self::F16(front(values, size)),
        }
    }
}

fn front<'a, T>(rest: &mut &'a [T], size: usize) -> &'a [T] {
    rest.split_off(..size).expect("no more is taken than there is")
}

fn front_mut<'a, T>(rest: &mut &'a mut [T], size: usize) -> &'a mut [T] {
    rest.split_off_mut(..size).expect("no more is taken than there is")
}
