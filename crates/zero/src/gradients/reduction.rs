//! How a bucket becomes the mean over the ranks of a group, in f32 or rounded to a narrower dtype for the way.

use crate::device::{Conversion, Gpu};
use candle_core::DType;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use sconce_collectives::{Buffer, Communicator, Counts, Element, ReduceOp, Result};
use std::ops::Range;

/// Elements converted by one task.
const BLOCK: usize = 1 << 15;

/// Which ranks get what of the mean.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reduction {
    /// All of it on every rank.
    All,
    /// Each rank its own of equal parts of so many elements; the rest is left as it may be.
    Scatter(usize),
}

impl Reduction {
    /// Replaces gradients by their mean over the group.
    pub(super) fn run(self, gradients: &mut [f32], dtype: DType, group: &dyn Communicator) -> Result<()> {
        match dtype {
            DType::BF16 => self.run_narrow::<bf16>(gradients, group),
            DType::F16 => self.run_narrow::<f16>(gradients, group),
            _ => self.run_as(gradients, group),
        }
    }

    fn run_narrow<T: Element + Default>(self, gradients: &mut [f32], group: &dyn Communicator) -> Result<()>
    where
        [T]: HalfFloatSliceExt,
    {
        let mut narrow = vec![T::default(); gradients.len()];
        let pairs = narrow.par_chunks_mut(BLOCK).zip(gradients.par_chunks(BLOCK));
        pairs.for_each(|(narrow, wide)| narrow.convert_from_f32_slice(wide));
        self.run_as(&mut narrow, group)?;
        let pairs = narrow.par_chunks(BLOCK).zip(gradients.par_chunks_mut(BLOCK));
        pairs.for_each(|(narrow, wide)| narrow.convert_to_f32_slice(wide));
        Ok(())
    }

    /// Does what [`Reduction::run`] does with elements of memory on the GPU.
    pub(super) fn run_on(
        self,
        gpu: &Gpu,
        (gradients, elements): (&mut Buffer, Range<usize>),
        dtype: DType,
        group: &dyn Communicator,
    ) -> crate::Result<()> {
        if dtype == DType::F32 {
            // Of one rank it is the gradients themselves, and nobody waits for them.
            return match group.size() {
                1 => Ok(()),
                _ => Ok(self.run_as(&mut gradients.for_peers::<f32>()[elements], group)?),
            };
        }
        let count = elements.len();
        let mut narrow = gpu.take(count * dtype.size_in_bytes())?;
        gpu.convert(dtype, (gradients, &elements), &mut narrow, Conversion::Narrow)?;
        if group.size() > 1 {
            match dtype {
                DType::BF16 => self.run_as(&mut narrow.for_peers::<bf16>()[..count], group)?,
                _ => self.run_as(&mut narrow.for_peers::<f16>()[..count], group)?,
            }
        }
        gpu.convert(dtype, (gradients, &elements), &mut narrow, Conversion::Widen)?;
        gpu.give_back(narrow);
        Ok(())
    }

    fn run_as<T: Element>(self, elements: &mut [T], group: &dyn Communicator) -> Result<()> {
        match self {
            Self::All => group.all_reduce(elements, ReduceOp::Mean),
            Self::Scatter(part) => group.reduce_scatter_in_place(elements, Counts::Equal(part), ReduceOp::Mean),
        }
    }
}
