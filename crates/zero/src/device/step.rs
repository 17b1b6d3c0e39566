//! What a kernel does in a step, and with what.

use super::{FlatMemory, ManagedTensor};
use crate::layout::{BucketLayout, Slot};
use crate::{StateSlices, StepKernel};
use candle_core::DType;
use sconce_collectives::Buffer;
use std::ops::Range;

/// The update of some elements by a kernel.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "read where there are kernels"))]
pub(crate) struct DeviceStep<'a> {
    pub(crate) kernel: StepKernel,
    /// The reduced gradient, and the first of its elements.
    pub(crate) gradient: (&'a Buffer, usize),
    /// The arrays that the rule keeps, and the first of their elements.
    pub(crate) state: (&'a mut [FlatMemory; StateSlices::MOST], usize),
    /// How gradient and arrays lie.
    pub(crate) spread: Spread,
}

/// How the elements of a parameter lie in memory of a bucket's layout: in chunks that begin at equal distances.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "read where there are kernels"))]
pub(crate) struct Spread {
    /// Elements of every chunk but for the last ones.
    pub(crate) chunk: usize,
    /// From the beginning of a chunk to that of the next.
    pub(crate) stride: usize,
}

impl Spread {
    /// Returns that of elements in one place.
    pub(crate) fn together(count: usize) -> Self {
        Self {
            chunk: count,
            stride: 0,
        }
    }

    /// Returns that of a parameter in a bucket.
    pub(crate) fn of(layout: &BucketLayout, slot: &Slot) -> Self {
        Self {
            chunk: slot.chunk(0).len(),
            stride: layout.part_elements,
        }
    }

    /// Returns the elements from the first to the last of so many.
    #[cfg(feature = "cuda")]
    pub(super) fn extent(self, count: usize) -> usize {
        match count {
            0 => 0,
            _ => (count - 1) / self.chunk * self.stride + (count - 1) % self.chunk + 1,
        }
    }
}

/// Elements of a gradient whose norm is asked for, by chunk.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "read where there are kernels"))]
pub(crate) struct NormPiece<'a> {
    pub(crate) memory: &'a Buffer,
    /// The first element.
    pub(crate) start: usize,
    pub(crate) count: usize,
    pub(crate) spread: Spread,
    pub(crate) chunks: usize,
}

/// Between f32 and 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Conversion {
    Narrow,
    Widen,
}

/// The values that a kernel updates.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "read where there are kernels"))]
pub(crate) enum StepTarget<'a> {
    /// Elements of an f32 tensor.
    Tensor(&'a ManagedTensor, Range<usize>),
    /// f32 masters, and those elements of a tensor of 16 bits that are their copies.
    Beside {
        masters: (&'a mut Buffer, Range<usize>),
        tensor: &'a ManagedTensor,
        elements: Range<usize>,
    },
    /// The same elements of a shard's values and of their masters, if there are some.
    Shard {
        values: &'a mut Buffer,
        masters: Option<&'a mut Buffer>,
        dtype: DType,
        within: Range<usize>,
    },
}
