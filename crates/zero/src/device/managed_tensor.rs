//! A parameter's tensor, and how engine code comes to its elements, wherever they are.

use super::Gpu;
use super::memory::DeviceMemory;
use super::staging::{Staging, Taken};
use crate::Tier;
use crate::storage::{ElementsMut, with_values};
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor};
use sconce_collectives::Buffer;
use std::cell::Cell;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// What is done with the elements that are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Intent {
    /// They are looked at; changes are lost.
    Read,
    /// All of them are written; what is there before may be anything.
    Overwrite,
    /// They are looked at and written.
    Change,
}

/// The tensor that a model computes with, for a parameter.
#[derive(Debug, Clone)]
pub(crate) struct ManagedTensor {
    tensor: Tensor,
    /// What copies pass through, if the elements are out of the engine's reach.
    apart: Option<Arc<Staging>>,
}

impl Deref for ManagedTensor {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

impl ManagedTensor {
    pub(crate) fn new(tensor: Tensor, staging: &Arc<Staging>) -> Self {
        let apart = staging.serves(tensor.device()).then(|| Arc::clone(staging));
        Self { tensor, apart }
    }

    /// Says whether the elements are out of the engine's reach, so that what is released has no memory at all.
    pub(crate) fn is_apart(&self) -> bool {
        self.apart.is_some()
    }

    /// Returns the range of all elements.
    pub(crate) fn all(&self) -> Range<usize> {
        0..self.tensor.elem_count()
    }

    /// Runs `work` on some elements of the tensor, which must be whole (not a view), of a managed dtype and not released.
    ///
    /// `work` must not touch the tensor by other ways: it would wait for itself.
    pub(crate) fn with_values<R>(
        &self,
        intent: Intent,
        elements: Range<usize>,
        work: impl FnOnce(ElementsMut<'_>) -> R,
    ) -> Result<R> {
        let Some(staging) = &self.apart else {
            return with_values(&self.tensor, |values| work(values.slice(elements)));
        };
        self.on_memory(|memory| {
            let (dtype, count) = (self.tensor.dtype(), elements.len());
            if !memory.holds(dtype, self.tensor.elem_count()) {
                candle_core::bail!(
                    "the elements of a parameter that is released, or of no managed dtype, were asked for"
                );
            }
            let mut host = staging.take(memory, count * dtype.size_in_bytes())?;
            match intent {
                Intent::Read | Intent::Change => memory.copy_out(elements.clone(), &mut host)?,
                Intent::Overwrite => host.spoil(),
            }
            let outcome = work(host.elements(dtype, count)?);
            if intent != Intent::Read {
                memory.copy_in(elements, &mut host)?;
            }
            Ok(outcome)
        })
    }

    /// Begins to fill the tensor, released or not, with other values: [`Filling::finish`] ends it.
    pub(crate) fn fill(&self) -> Result<Filling<'_>> {
        let bytes = self.tensor.elem_count() * self.tensor.dtype().size_in_bytes();
        let host = match &self.apart {
            Some(staging) => Some(self.on_memory(|memory| {
                let mut host = staging.take(memory, bytes)?;
                host.spoil();
                Ok(host)
            })?),
            None => None,
        };
        Ok(Filling { tensor: self, host })
    }

    /// Fills the tensor, released or not, with the values that `work` writes.
    pub(crate) fn fill_with<R>(&self, work: impl FnOnce(ElementsMut<'_>) -> R) -> Result<R> {
        let mut filling = self.fill()?;
        let result = filling.with_values(self.all(), work)?;
        filling.finish()?;
        Ok(result)
    }

    /// Copies some elements to a buffer on the tensor's device, from one of its bytes on.
    pub(crate) fn copy_to_buffer(&self, elements: Range<usize>, buffer: &mut Buffer, at: usize) -> Result<()> {
        self.on_memory(|memory| memory.copy_to_buffer(elements, buffer, at))
    }

    /// Copies elements of a whole tensor from a buffer on its device, each range from one of its bytes on.
    pub(crate) fn copy_from_buffer(
        &self,
        buffer: &Buffer,
        ranges: impl Iterator<Item = (Range<usize>, usize)>,
    ) -> Result<()> {
        self.on_memory(|memory| {
            let mut ranges = ranges;
            ranges.try_for_each(|(elements, at)| memory.copy_from_buffer(elements, buffer, at))
        })
    }

    /// Does so with a tensor that may be released; all its elements must be in the ranges.
    pub(crate) fn fill_from_buffer(
        &self,
        buffer: &Buffer,
        ranges: impl Iterator<Item = (Range<usize>, usize)>,
    ) -> Result<()> {
        let (dtype, count) = (self.tensor.dtype(), self.tensor.elem_count());
        self.on_memory(|memory| match memory.holds(dtype, count) {
            true => Ok(()),
            false => memory.allocate(dtype, count),
        })?;
        self.copy_from_buffer(buffer, ranges)
    }

    /// Returns the GPU on which state of a tier lies that belongs to the tensor, if that is one.
    pub(crate) fn gpu(&self, tier: Tier) -> Option<&Gpu> {
        let gpu = self.apart.as_ref()?.gpu(tier)?;
        gpu.reaches(&self.tensor).then_some(gpu)
    }

    /// Gives back the memory of the elements; until the tensor is filled again, nothing can compute with it.
    pub(crate) fn release(&self) -> Result<()> {
        match &self.apart {
            Some(_) => self.on_memory(|memory| memory.give_back()),
            None => crate::release::release(&self.tensor),
        }
    }

    /// Runs `work` on the tensor's storage, under its lock.
    pub(super) fn on_memory<R>(&self, work: impl FnOnce(&mut dyn DeviceMemory) -> Result<R>) -> Result<R> {
        let task = OnMemory {
            work: Cell::new(Some(work)),
            outcome: Cell::new(None),
        };
        self.tensor.inplace_op1(&task)?;
        match task.outcome.into_inner() {
            Some(outcome) => Ok(outcome),
            None => candle_core::bail!("an in-place op on {:?} did not run", self.tensor.dims()),
        }
    }
}

/// New values of a tensor on their way.
#[derive(Debug)]
pub(crate) struct Filling<'a> {
    tensor: &'a ManagedTensor,
    /// The values, unless they go into the tensor at once.
    host: Option<Taken>,
}

impl Filling<'_> {
    /// Runs `work` on some of the elements to be, all of which it must write.
    pub(crate) fn with_values<R>(
        &mut self,
        elements: Range<usize>,
        work: impl FnOnce(ElementsMut<'_>) -> R,
    ) -> Result<R> {
        let Some(host) = &mut self.host else {
            return with_values(self.tensor, |values| work(values.slice(elements)));
        };
        let values = host.elements(self.tensor.dtype(), self.tensor.elem_count())?;
        Ok(work(values.slice(elements)))
    }

    /// Gives the tensor the values that have been written.
    pub(crate) fn finish(self) -> Result<()> {
        let Self { tensor, host } = self;
        let Some(mut host) = host else { return Ok(()) };
        let (dtype, count) = (tensor.dtype(), tensor.elem_count());
        tensor.on_memory(|memory| {
            if !memory.holds(dtype, count) {
                memory.allocate(dtype, count)?;
            }
            memory.copy_in(0..count, &mut host)
        })
    }
}

/// Work to be done once on a tensor's storage, and its outcome.
struct OnMemory<F, R> {
    work: Cell<Option<F>>,
    outcome: Cell<Option<R>>,
}

impl<R, F: FnOnce(&mut dyn DeviceMemory) -> Result<R>> OnMemory<F, R> {
    fn run(&self, memory: &mut dyn DeviceMemory, layout: &Layout) -> Result<()> {
        if !layout.is_contiguous() || layout.start_offset() != 0 {
            candle_core::bail!("only whole tensors are worked on in place, this is a view");
        }
        if let Some(work) = self.work.take() {
            self.outcome.set(Some(work(memory)?));
        }
        Ok(())
    }
}

impl<R, F: FnOnce(&mut dyn DeviceMemory) -> Result<R>> InplaceOp1 for OnMemory<F, R> {
    fn name(&self) -> &'static str {
        "on-device-memory"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        self.run(storage, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut candle_core::CudaStorage, layout: &Layout) -> Result<()> {
        self.run(storage, layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    /// A tensor of these values that is treated as if it were on a device.
    fn apart(values: &[f32]) -> ManagedTensor {
        let tensor = Tensor::new(values, &Device::Cpu).unwrap();
        ManagedTensor::new(tensor, &Arc::new(Staging::new(true)))
    }

    fn f32s(values: ElementsMut<'_>) -> &mut [f32] {
        match values {
            ElementsMut::F32(values) => values,
            _ => panic!("the tensor is f32"),
        }
    }

    #[test]
    fn an_intent_says_what_is_copied() {
        let tensor = apart(&[1.0, 2.0, 3.0, 4.0]);
        let run = |intent| {
            let seen = tensor.with_values(intent, 1..3, |values| {
                let values = f32s(values);
                let seen = values.to_vec();
                values.copy_from_slice(&[7.0, 8.0]);
                seen
            });
            (seen.unwrap(), tensor.to_vec1::<f32>().unwrap())
        };
        assert_eq!(run(Intent::Read), (vec![2.0, 3.0], vec![1.0, 2.0, 3.0, 4.0]));
        let (seen, now) = run(Intent::Overwrite);
        assert!(seen.iter().all(|value| value.is_nan()));
        assert_eq!(now, [1.0, 7.0, 8.0, 4.0]);
        assert_eq!(run(Intent::Change).0, [7.0, 8.0]);
    }

    #[test]
    fn a_released_parameter_cannot_be_computed_with_until_it_is_filled() {
        let tensor = apart(&[1.0, 2.0, 3.0, 4.0]);
        let (view, row) = (tensor.reshape((2, 2)).unwrap(), tensor.reshape((1, 4)).unwrap());
        tensor.release().unwrap();
        let ones = Tensor::ones((2, 2), DType::F32, &Device::Cpu).unwrap();
        let attempts = [
            view.matmul(&ones),
            ones.matmul(&view),
            ones.matmul(&view.t().unwrap()),
            &view + &ones,
            &ones * &view,
            view.sqr(),
            view.exp(),
            &view * 2.0,
            view.to_dtype(DType::BF16),
            view.t().unwrap().contiguous(),
            view.sum_all(),
            view.max(0),
            view.broadcast_add(&ones),
            Tensor::cat(&[&view, &ones], 0),
            view.index_select(&Tensor::new(&[0u32, 1], &Device::Cpu).unwrap(), 0),
            view.narrow(0, 1, 1).unwrap().force_contiguous(),
            row.broadcast_mul(&tensor),
        ];
        for (number, attempt) in attempts.into_iter().enumerate() {
            assert!(attempt.is_err(), "attempt {number}");
        }
        assert!(view.to_vec2::<f32>().is_err());
        assert!(tensor.with_values(Intent::Change, 0..4, |_| ()).is_err());
        assert!(tensor.with_values(Intent::Overwrite, 0..4, |_| ()).is_err());

        let mut filling = tensor.fill().unwrap();
        filling.with_values(0..1, |values| f32s(values)[0] = 5.0).unwrap();
        filling.with_values(1..4, |values| f32s(values).fill(6.0)).unwrap();
        assert!(view.sum_all().is_err());
        filling.finish().unwrap();
        assert_eq!(view.to_vec2::<f32>().unwrap(), [[5.0, 6.0], [6.0, 6.0]]);
    }

    #[test]
    fn views_are_refused() {
        let tensor = apart(&[1.0, 2.0]);
        let view = ManagedTensor::new(tensor.narrow(0, 1, 1).unwrap(), &Arc::new(Staging::new(true)));
        assert!(view.with_values(Intent::Read, 0..1, |_| ()).is_err());
    }
}
