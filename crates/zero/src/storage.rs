//! Moving the storage of a tensor out and back in, while the model and the graph keep pointing at the tensor.
//!
//! candle's [`InplaceOp1`] hands out `&mut` to the storage inside a tensor's lock, so the storage may be replaced as a
//! whole; every clone, view and graph node of that tensor sees the new one.
//!
//! # Soundness
//! While a storage is out, the tensor's shape promises elements that are not there, and candle's CPU kernels reach them
//! through raw pointers without looking. So between [`take`] and [`put`] no candle op may touch the tensor. Both are
//! called only here, in [`with_taken`], which runs a closure that is given plain slices and no tensor, and which puts
//! everything back even when the closure panics. Nothing of this module is public outside the crate.

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor};
use std::sync::Mutex;

/// Runs `work` on the elements of `tensors`, which are moved out of them meanwhile.
///
/// The tensors must be whole (not views) f32 tensors on the CPU.
pub(crate) fn with_taken<R>(tensors: &[&Tensor], work: impl FnOnce(&mut [Vec<f32>]) -> R) -> Result<R> {
    let mut taken = Taken {
        tensors,
        elements: Vec::with_capacity(tensors.len()),
    };
    for tensor in tensors {
        let elements = take(tensor)?;
        taken.elements.push(elements);
    }
    Ok(work(&mut taken.elements))
}

/// Storages on loan; given back on drop.
struct Taken<'t> {
    tensors: &'t [&'t Tensor],
    elements: Vec<Vec<f32>>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        for (tensor, elements) in self.tensors.iter().zip(self.elements.drain(..)) {
            put(tensor, elements).expect("a storage that was taken from a tensor fits back");
        }
    }
}

fn take(tensor: &Tensor) -> Result<Vec<f32>> {
    let swap = Swap::new(Vec::new());
    tensor.inplace_op1(&swap)?;
    let elements = swap.into_inner();
    if elements.len() != tensor.elem_count() {
        let found = elements.len();
        put(tensor, elements)?;
        candle_core::bail!(
            "storage has {found} elements where the shape {:?} was expected",
            tensor.dims()
        );
    }
    Ok(elements)
}

fn put(tensor: &Tensor, elements: Vec<f32>) -> Result<()> {
    tensor.inplace_op1(&Swap::new(elements))
}

/// Exchanges a tensor's storage for its own.
struct Swap(Mutex<Vec<f32>>);

impl Swap {
    fn new(elements: Vec<f32>) -> Self {
        Self(Mutex::new(elements))
    }

    fn into_inner(self) -> Vec<f32> {
        self.0.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl InplaceOp1 for Swap {
    fn name(&self) -> &'static str {
        "swap-storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _layout: &Layout) -> Result<()> {
        match storage {
            CpuStorage::F32(elements) => {
                let mut own = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                std::mem::swap(elements, &mut *own);
                Ok(())
            }
            _ => candle_core::bail!("swap-storage works on f32 storages"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn changed_elements_are_seen_by_the_tensor_and_its_views() {
        let tensor = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap();
        let view = tensor.t().unwrap();
        with_taken(&[&tensor], |elements| elements[0][1] = 7.0).unwrap();
        assert_eq!(view.to_vec2::<f32>().unwrap(), [[1.0, 3.0], [7.0, 4.0]]);
    }

    #[test]
    fn elements_come_back_after_a_panic() {
        let tensor = Tensor::new(&[1f32, 2.0], &Device::Cpu).unwrap();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            with_taken(&[&tensor], |_| std::panic::resume_unwind(Box::new("on purpose")))
        }));
        assert!(panicked.is_err());
        assert_eq!(tensor.to_vec1::<f32>().unwrap(), [1.0, 2.0]);
    }
}
