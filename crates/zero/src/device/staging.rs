//! Host memory through which values pass between a device and the engine, kept for the next ones.

use super::Gpu;
use super::memory::{DeviceMemory, HostMemory, SideStream};
use crate::Tier;
use crate::storage::{ElementsMut, is_managed_dtype};
use candle_core::{DType, Device, Result, Storage, Tensor};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// An engine's host memory for copies.
///
/// There is never more of it than was in use at one time.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    emulates: bool,
    /// What copies of gradients run on.
    side: SideStream,
    /// Where state lies, once parameters are on a device; `None` within if it cannot.
    gpu: OnceLock<Option<Gpu>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<HostMemory>,
    /// Of all there is, free or not.
    bytes: usize,
}

/// Host memory in use; goes back when it is dropped, also if a copy is still under way.
#[derive(Debug)]
pub(super) struct Taken {
    staging: Arc<Staging>,
    /// There until it goes back.
    host: Option<HostMemory>,
}

/// The elements of a tensor on their way from a device.
#[derive(Debug)]
pub(crate) struct Reading {
    host: Taken,
    dtype: DType,
    count: usize,
    /// Its memory must not be used for anything else before the copy is over.
    _source: Tensor,
}

impl Reading {
    /// Returns the number of bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.dtype.size_in_bytes()
    }

    /// Waits for the elements and runs `work` on them.
    pub(crate) fn finish<R>(mut self, work: impl FnOnce(ElementsMut<'_>) -> R) -> Result<R> {
        Ok(work(self.host.elements(self.dtype, self.count)?))
    }
}

impl Staging {
    /// Makes it, empty; one that `emulates` a device treats memory on the CPU as if it were on one.
    pub(crate) fn new(emulates: bool) -> Self {
        Self {
            emulates,
            ..Self::default()
        }
    }

    /// Says whether the memory of tensors on a device is out of the engine's reach.
    pub(crate) fn serves(&self, device: &Device) -> bool {
        self.emulates || !device.is_cpu()
    }

    /// Prepares for parameters on a device; an error where there can be none.
    pub(crate) fn open(&self, device: &Device) -> Result<()> {
        match device {
            Device::Cpu => Ok(()),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                super::cuda::prepare(device)?;
                if self.gpu.get().is_none() {
                    let gpu = Gpu::open(device)?;
                    self.gpu.get_or_init(|| gpu);
                }
                Ok(())
            }
            other => candle_core::bail!(
                "managed parameters on {other:?}: build the model on the CPU, or on a CUDA device with the feature cuda"
            ),
        }
    }

    /// Returns the GPU on which state of a tier lies, if it does on one.
    pub(crate) fn gpu(&self, tier: Tier) -> Option<&Gpu> {
        self.gpu.get()?.as_ref().filter(|_| tier == Tier::Device)
    }

    /// Returns the GPU that memory which is on one belongs to.
    pub(crate) fn any_gpu(&self) -> Option<&Gpu> {
        self.gpu(Tier::Device)
    }

    /// Returns how often the host has looked at state on a GPU.
    pub(crate) fn host_accesses(&self) -> u64 {
        self.any_gpu().map_or(0, Gpu::host_accesses)
    }

    /// Returns the bytes that there are.
    pub(crate) fn bytes(&self) -> usize {
        self.lock().bytes + self.any_gpu().map_or(0, Gpu::passing_bytes)
    }

    /// Begins to copy a tensor's elements in order, beside what is computed later; the tensor is contiguous, of a managed
    /// dtype, and not written any more.
    pub(crate) fn read(self: &Arc<Self>, tensor: &Tensor) -> Result<Reading> {
        let (storage, layout) = tensor.storage_and_layout();
        let dtype = tensor.dtype();
        let Some((start, end)) = layout.contiguous_offsets().filter(|_| is_managed_dtype(dtype)) else {
            candle_core::bail!("only contiguous tensors of f32, bf16 and f16 are copied from a device");
        };
        let memory: &dyn DeviceMemory = match &*storage {
            Storage::Cpu(memory) => memory,
            #[cfg(feature = "cuda")]
            Storage::Cuda(memory) => memory,
            _ => candle_core::bail!("nothing is copied from {:?}", tensor.device()),
        };
        let mut host = self.take(memory, (end - start) * dtype.size_in_bytes())?;
        memory.copy_out_aside(start..end, &mut host, &self.side)?;
        drop(storage);
        Ok(Reading {
            host,
            dtype,
            count: end - start,
            _source: tensor.clone(),
        })
    }

    /// Returns memory for so many bytes: the smallest that is free and large enough.
    ///
    /// Where all that is free is too small, the largest of it makes room.
    pub(super) fn take(self: &Arc<Self>, memory: &dyn DeviceMemory, bytes: usize) -> Result<Taken> {
        let mut state = self.lock();
        let numbered = || state.free.iter().enumerate().map(|(number, free)| (free.len(), number));
        let found = numbered().filter(|(size, _)| *size >= bytes).min();
        let host = match (found, numbered().max()) {
            (Some((_, number)), _) => state.free.swap_remove(number),
            (None, too_small) => {
                if let Some((size, number)) = too_small {
                    drop(state.free.swap_remove(number));
                    state.bytes -= size;
                }
                let host = memory.host_memory(bytes)?;
                state.bytes += host.len();
                host
            }
        };
        Ok(Taken {
            staging: Arc::clone(self),
            host: Some(host),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Deref for Taken {
    type Target = HostMemory;

    fn deref(&self) -> &HostMemory {
        self.host.as_ref().expect("the memory is there until it is dropped")
    }
}

impl DerefMut for Taken {
    fn deref_mut(&mut self) -> &mut HostMemory {
        self.host.as_mut().expect("the memory is there until it is dropped")
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.staging.lock().free.extend(self.host.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::CpuStorage;

    #[test]
    fn there_is_no_more_memory_than_was_in_use_at_one_time() {
        let (staging, device) = (Arc::new(Staging::new(true)), CpuStorage::F32(Vec::new()));
        let take = |bytes| staging.take(&device, bytes).unwrap();
        let both = (take(100), take(1000));
        assert_eq!((both.0.len(), both.1.len(), staging.bytes()), (100, 1000, 1100));
        drop(both);
        for (bytes, taken, all) in [
            (50, 100, 1100),
            (101, 1000, 1100),
            (2000, 2000, 2100),
            (1500, 2000, 2100),
        ] {
            assert_eq!((take(bytes).len(), staging.bytes()), (taken, all));
        }
    }

    #[test]
    fn a_tensor_is_read_from_where_it_begins_in_its_storage() {
        let tensor = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu).unwrap();
        let staging = Arc::new(Staging::new(true));
        let reading = staging.read(&tensor.get(1).unwrap()).unwrap();
        assert_eq!(reading.bytes(), 8);
        let seen = reading.finish(|values| format!("{values:?}")).unwrap();
        assert_eq!(seen, "F32([3.0, 4.0])");
        assert!(staging.read(&tensor.t().unwrap()).is_err());
    }
}
