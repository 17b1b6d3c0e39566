//! Working on a tensor's elements in place, while the model and the graph keep pointing at the tensor.
//!
//! candle's [`InplaceOp1`] hands out `&mut` to the storage inside a tensor's lock; every clone, view and graph node of
//! that tensor sees the change. The lock is held while the work runs, so an op of another thread that reads the tensor
//! waits: it never sees a storage that is half there.

use bytemuck::{cast_slice_mut, try_cast_slice_mut};
use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::cell::Cell;
use std::ops::Range;

/// The elements of a managed tensor.
#[derive(Debug)]
pub(crate) enum ElementsMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    F16(&'a mut [f16]),
}

/// Elements that are looked at, in a dtype that parameters may have.
#[derive(Debug, Clone, Copy)]
pub enum Elements<'a> {
    /// f32.
    F32(&'a [f32]),
    /// bf16.
    Bf16(&'a [bf16]),
    /// f16.
    F16(&'a [f16]),
}

/// Says whether a tensor of this dtype can be managed.
pub(crate) fn is_managed_dtype(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

/// Returns storage of `count` zeros that takes no memory before it is written, as far as the allocator can.
pub(crate) fn zeros(dtype: DType, count: usize) -> Result<CpuStorage> {
    match dtype {
        DType::F32 => Ok(CpuStorage::F32(bytemuck::zeroed_vec(count))),
        DType::BF16 => Ok(CpuStorage::BF16(bytemuck::zeroed_vec(count))),
        DType::F16 => Ok(CpuStorage::F16(bytemuck::zeroed_vec(count))),
        other => candle_core::bail!("no managed parameter is {}", other.as_str()),
    }
}

/// Runs `work` on the elements of `tensor`, which must be a whole (not a view) tensor of a managed dtype on the CPU.
///
/// `work` must not touch the tensor by other ways: it would wait for itself.
pub(crate) fn with_values<R>(tensor: &Tensor, work: impl FnOnce(ElementsMut<'_>) -> R) -> Result<R> {
    let task = Task {
        work: Cell::new(Some(work)),
        outcome: Cell::new(None),
    };
    tensor.inplace_op1(&task)?;
    match task.outcome.into_inner() {
        Some(outcome) => Ok(outcome),
        None => candle_core::bail!("an in-place op on {:?} did not run", tensor.dims()),
    }
}

/// Does what [`with_values`] does, with the elements as bytes.
pub(crate) fn with_bytes<R>(tensor: &Tensor, work: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
    with_values(tensor, |values| work(values.into_bytes()))
}

/// Exchanges the memory of two whole tensors of one dtype and size.
pub(crate) fn exchange(a: &Tensor, b: &Tensor) -> Result<()> {
    if a.dtype() != b.dtype() || a.elem_count() != b.elem_count() {
        candle_core::bail!("only tensors of one dtype and size exchange their memory");
    }
    a.inplace_op1(&Exchange { with: b })
}

/// Exchanges a tensor's storage with another tensor's, under the locks of both.
struct Exchange<'a> {
    with: &'a Tensor,
}

impl InplaceOp1 for Exchange<'_> {
    fn name(&self) -> &'static str {
        "exchange-memory"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _layout: &Layout) -> Result<()> {
        let passing = Passing(Cell::new(Some(std::mem::replace(storage, CpuStorage::U8(Vec::new())))));
        let outcome = self.with.inplace_op1(&passing);
        // The other's, or the own one back if the op did not run.
        if let Some(given) = passing.0.take() {
            *storage = given;
        }
        outcome
    }
}

/// A storage on its way, which an op leaves in exchange for the tensor's.
struct Passing(Cell<Option<CpuStorage>>);

impl InplaceOp1 for Passing {
    fn name(&self) -> &'static str {
        "exchange-memory"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _layout: &Layout) -> Result<()> {
        if let Some(given) = self.0.take() {
            self.0.set(Some(std::mem::replace(storage, given)));
        }
        Ok(())
    }
}

impl<'a> Elements<'a> {
    /// Returns elements `range`.
    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(elements) => Self::F32(&elements[range]),
            Self::Bf16(elements) => Self::Bf16(&elements[range]),
            Self::F16(elements) => Self::F16(&elements[range]),
        }
    }

    /// Copies the elements as f32.
    pub(crate) fn copy_to(self, wide: &mut [f32]) {
        match self {
            Self::F32(elements) => wide.copy_from_slice(elements),
            Self::Bf16(elements) => elements.convert_to_f32_slice(wide),
            Self::F16(elements) => elements.convert_to_f32_slice(wide),
        }
    }

    /// Adds the elements to sums in f32.
    pub(crate) fn add_to(self, sums: &mut [f32]) {
        match self {
            Self::F32(elements) => sums.iter_mut().zip(elements).for_each(|(sum, value)| *sum += value),
            Self::Bf16(elements) => {
                let values = elements.iter().map(|value| value.to_f32());
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
            Self::F16(elements) => {
                let values = elements.iter().map(|value| value.to_f32());
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
            }
        }
    }
}

impl<'a> ElementsMut<'a> {
    /// Returns bytes as elements of a managed dtype.
    pub(crate) fn of_bytes(dtype: DType, bytes: &'a mut [u8]) -> Result<Self> {
        let misplaced = |_| candle_core::Error::msg("bytes of another size or place than elements of a tensor");
        match dtype {
            DType::F32 => Ok(Self::F32(try_cast_slice_mut(bytes).map_err(misplaced)?)),
            DType::BF16 => Ok(Self::Bf16(try_cast_slice_mut(bytes).map_err(misplaced)?)),
            DType::F16 => Ok(Self::F16(try_cast_slice_mut(bytes).map_err(misplaced)?)),
            other => candle_core::bail!("no managed parameter is {}", other.as_str()),
        }
    }

    /// Returns the elements to look at.
    pub(crate) fn shared(&self) -> Elements<'_> {
        match self {
            Self::F32(elements) => Elements::F32(elements),
            Self::Bf16(elements) => Elements::Bf16(elements),
            Self::F16(elements) => Elements::F16(elements),
        }
    }

    pub(crate) fn into_bytes(self) -> &'a mut [u8] {
        match self {
            Self::F32(elements) => cast_slice_mut(elements),
            Self::Bf16(elements) => cast_slice_mut(elements),
            Self::F16(elements) => cast_slice_mut(elements),
        }
    }

    /// Returns elements `range`.
    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(elements) => Self::F32(&mut elements[range]),
            Self::Bf16(elements) => Self::Bf16(&mut elements[range]),
            Self::F16(elements) => Self::F16(&mut elements[range]),
        }
    }

    /// Replaces the elements by others, rounded to nearest even.
    pub(crate) fn round_from(self, source: &[f32]) {
        match self {
            Self::F32(elements) => elements.copy_from_slice(source),
            Self::Bf16(elements) => elements.convert_from_f32_slice(source),
            Self::F16(elements) => elements.convert_from_f32_slice(source),
        }
    }
}

/// Work to be done once, and its outcome.
struct Task<F, R> {
    work: Cell<Option<F>>,
    outcome: Cell<Option<R>>,
}

impl<R, F: FnOnce(ElementsMut<'_>) -> R> InplaceOp1 for Task<F, R> {
    fn name(&self) -> &'static str {
        "with-values"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let count = layout.shape().elem_count();
        let values = match storage {
            CpuStorage::F32(elements) if elements.len() == count => ElementsMut::F32(elements),
            CpuStorage::BF16(elements) if elements.len() == count => ElementsMut::Bf16(elements),
            CpuStorage::F16(elements) if elements.len() == count => ElementsMut::F16(elements),
            _ => candle_core::bail!("only whole f32, bf16 and f16 tensors are worked on in place"),
        };
        if !layout.is_contiguous() || layout.start_offset() != 0 {
            candle_core::bail!("only whole tensors are worked on in place, this is a view");
        }
        self.outcome.set(self.work.take().map(|work| work(values)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn changed_elements_are_seen_by_the_tensor_and_its_views() {
        let tensor = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap();
        let view = tensor.t().unwrap();
        let length = with_values(&tensor, |values| {
            let ElementsMut::F32(elements) = values.slice(1..3) else {
                panic!("the tensor is f32")
            };
            elements[0] = 7.0;
            elements.len()
        });
        assert_eq!(length.unwrap(), 2);
        assert_eq!(view.to_vec2::<f32>().unwrap(), [[1.0, 3.0], [7.0, 4.0]]);
    }

    #[test]
    fn values_are_rounded_to_the_tensors_dtype() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let tensor = Tensor::zeros(3, dtype, &Device::Cpu).unwrap();
            let source = [1.0f32, 1.0 + 1.0 / 256.0, -3.3];
            with_values(&tensor, |values| values.round_from(&source)).unwrap();
            let expected = Tensor::new(&source, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let wide = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(wide(&tensor), wide(&expected));
        }
    }

    #[test]
    fn a_tensor_can_be_used_after_a_panic() {
        let tensor = Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            with_bytes(&tensor, |_| std::panic::resume_unwind(Box::new("on purpose")))
        }));
        assert!(panicked.is_err());
        assert_eq!(tensor.to_vec1::<f32>().unwrap(), [1.0, 2.0]);
    }

    #[test]
    fn views_and_other_dtypes_are_refused() {
        let tensor = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap();
        let doubles = tensor.to_dtype(DType::F64).unwrap();
        for refused in [
            tensor.t().unwrap(),
            tensor.get(0).unwrap(),
            tensor.get(1).unwrap(),
            doubles,
        ] {
            assert!(with_values(&refused, |_| ()).is_err());
        }
    }
}
