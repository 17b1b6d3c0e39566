//! What a kernel does in a step, and with what.

use super::{FlatMemory, ManagedTensor};
use crate::{StateSlices, StepKernel};
use candle_core::DType;
use sconce_collectives::Buffer;
use std::ops::Range;

/// The update of some elements by a kernel.
#[derive(Debug)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "read where there are kernels"))]
pub(crate) struct DeviceStep<'a> {
    pub(crate) kernel: StepKernel,
    /// The reduced gradient, and which of its elements.
    pub(crate) gradient: (&'a Buffer, Range<usize>),
    /// The arrays that the rule keeps, and which of their elements.
    pub(crate) state: (&'a mut [FlatMemory; StateSlices::MOST], Range<usize>),
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
