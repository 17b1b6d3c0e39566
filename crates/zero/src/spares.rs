//! Memory of parameters that have been given up, kept for those that are gathered next.
//!
//! Pages that come from the system are zeroed and mapped one by one, which costs several times what filling them does. So a
//! tensor that is given up keeps its memory as long as that is within limits, and one of the same dtype and size that is
//! gathered takes it in exchange for its own, which has none but always has the address space: an op that uses a parameter
//! at the wrong time computes nonsense, it does not break memory.
//!
//! Memory on a device is not kept: it goes back to the device's own pool, which is quick.

use crate::Result;
use crate::device::ManagedTensor;
use crate::release::{release, spoil};
use crate::storage::exchange;
use candle_core::Tensor;
use std::collections::VecDeque;

/// Tensors whose values are not needed but whose memory is there, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Spares {
    tensors: VecDeque<Tensor>,
    bytes: usize,
}

impl Spares {
    /// Returns the bytes that are there.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes a tensor whose values are not needed any more; they become nonsense.
    pub(crate) fn take(&mut self, tensor: &ManagedTensor) -> Result<()> {
        if tensor.is_apart() {
            return Ok(tensor.release()?);
        }
        spoil(tensor)?;
        self.bytes += bytes(tensor);
        self.tensors.push_back(Tensor::clone(tensor));
        Ok(())
    }

    /// Gives memory to a tensor that is filled next: its own if that is still there, else an alike one's.
    pub(crate) fn supply(&mut self, tensor: &Tensor) -> Result<()> {
        let own = self.tensors.iter().position(|spare| spare.id() == tensor.id());
        let is_alike = |spare: &Tensor| spare.dtype() == tensor.dtype() && spare.elem_count() == tensor.elem_count();
        let place = own.or_else(|| self.tensors.iter().position(is_alike));
        let Some(spare) = place.and_then(|place| self.tensors.remove(place)) else {
            return Ok(());
        };
        self.bytes -= bytes(&spare);
        if spare.id() != tensor.id() {
            exchange(tensor, &spare)?;
        }
        Ok(())
    }

    /// Gives memory back to the system until no more than `most` bytes are there.
    pub(crate) fn limit(&mut self, most: usize) -> Result<()> {
        while self.bytes > most
            && let Some(spare) = self.tensors.pop_front()
        {
            self.bytes -= bytes(&spare);
            release(&spare)?;
        }
        Ok(())
    }
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};
    use std::sync::Arc;

    fn filled(count: usize, value: f32) -> ManagedTensor {
        managed(Tensor::full(value, count, &Device::Cpu).unwrap())
    }

    fn managed(tensor: Tensor) -> ManagedTensor {
        ManagedTensor::new(tensor, &Arc::default())
    }

    fn address(tensor: &Tensor) -> usize {
        crate::storage::with_bytes(tensor, |bytes| bytes.as_ptr().addr()).unwrap()
    }

    #[test]
    fn memory_goes_to_the_same_tensor_or_to_one_of_its_dtype_and_size_and_every_view_sees_it() {
        let (first, second, other) = (filled(5000, 1.0), filled(5000, 2.0), filled(4999, 3.0));
        let view = second.reshape((50, 100)).unwrap();
        let (its_own, anothers) = (address(&second), address(&first));
        let mut spares = Spares::default();
        spares.take(&first).unwrap();
        assert_eq!(spares.bytes(), 20_000);
        spares.supply(&other).unwrap();
        assert_eq!(spares.bytes(), 20_000);
        spares.supply(&second).unwrap();
        assert_eq!(
            (spares.bytes(), address(&second), address(&first)),
            (0, anothers, its_own)
        );
        // What was given up is no number at its beginning, whose memory it is now; the other has its old values.
        assert!(view.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0].is_nan());
        assert_eq!(first.to_vec1::<f32>().unwrap()[0], 2.0);
        spares.take(&second).unwrap();
        spares.take(&first).unwrap();
        spares.supply(&first).unwrap();
        assert_eq!((spares.bytes(), address(&first)), (20_000, its_own));
    }

    #[test]
    fn the_oldest_goes_back_first() {
        let tensors = [1, 2, 3].map(|number| filled(1000, number as f32));
        let half = managed(Tensor::zeros(1000, DType::BF16, &Device::Cpu).unwrap());
        let mut spares = Spares::default();
        tensors
            .iter()
            .chain([&half])
            .for_each(|tensor| spares.take(tensor).unwrap());
        assert_eq!(spares.bytes(), 14_000);
        spares.limit(9_999).unwrap();
        assert_eq!(spares.bytes(), 6_000);
        let ids = Vec::from_iter(spares.tensors.iter().map(Tensor::id));
        assert_eq!(ids, [tensors[2].id(), half.id()]);
        spares.limit(0).unwrap();
        assert_eq!(spares.bytes(), 0);
    }
}
