//! Working on a tensor's elements in place, while the model and the graph keep pointing at the tensor.
//!
//! candle's [`InplaceOp1`] hands out `&mut` to the storage inside a tensor's lock; every clone, view and graph node of
//! that tensor sees the change. The lock is held while the work runs, so an op of another thread that reads the tensor
//! waits: it never sees a storage that is half there.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor};
use std::cell::Cell;

/// Runs `work` on the elements of `tensor`, which must be a whole (not a view) f32 tensor on the CPU.
///
/// `work` must not touch the tensor by other ways: it would wait for itself.
pub(crate) fn with_elements<R>(tensor: &Tensor, work: impl FnOnce(&mut [f32]) -> R) -> Result<R> {
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

/// Work to be done once, and its outcome.
struct Task<F, R> {
    work: Cell<Option<F>>,
    outcome: Cell<Option<R>>,
}

impl<R, F: FnOnce(&mut [f32]) -> R> InplaceOp1 for Task<F, R> {
    fn name(&self) -> &'static str {
        "with-elements"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let count = layout.shape().elem_count();
        let is_whole = layout.is_contiguous() && layout.start_offset() == 0;
        match storage {
            CpuStorage::F32(elements) if is_whole && elements.len() == count => {
                self.outcome.set(self.work.take().map(|work| work(elements)));
                Ok(())
            }
            _ => candle_core::bail!("with-elements works on whole f32 tensors"),
        }
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
        let length = with_elements(&tensor, |elements| {
            elements[1] = 7.0;
            elements.len()
        });
        assert_eq!(length.unwrap(), 4);
        assert_eq!(view.to_vec2::<f32>().unwrap(), [[1.0, 3.0], [7.0, 4.0]]);
    }

    #[test]
    fn a_tensor_can_be_used_after_a_panic() {
        let tensor = Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            with_elements(&tensor, |_| std::panic::resume_unwind(Box::new("on purpose")))
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
            assert!(with_elements(&refused, |_| ()).is_err());
        }
    }
}
