//! Memory that engine code can only copy from and to, and host memory for such copies.

use crate::storage::{ElementsMut, zeros};
use bytemuck::{cast_slice, cast_slice_mut};
use candle_core::{CpuStorage, DType, Result};
use sconce_collectives::Buffer;
use std::ops::Range;

#[cfg(feature = "cuda")]
use super::cuda::PinnedMemory;

/// The storage of a tensor on a device.
pub(super) trait DeviceMemory {
    /// Returns host memory for copies from and to this device.
    fn host_memory(&self, bytes: usize) -> Result<HostMemory>;

    /// Says whether so many elements of a managed dtype are there.
    fn holds(&self, dtype: DType, count: usize) -> bool;

    /// Starts a copy of some elements to the beginning of host memory.
    fn copy_out(&self, elements: Range<usize>, host: &mut HostMemory) -> Result<()>;

    /// Starts such a copy beside the stream that computes with the elements, behind what is in it.
    fn copy_out_aside(&self, elements: Range<usize>, host: &mut HostMemory, side: &SideStream) -> Result<()>;

    /// Starts a copy of some elements from the beginning of host memory.
    fn copy_in(&mut self, elements: Range<usize>, host: &mut HostMemory) -> Result<()>;

    /// Copies some elements to a buffer of the engine's on that device, from one of its bytes on.
    fn copy_to_buffer(&self, elements: Range<usize>, buffer: &mut Buffer, at: usize) -> Result<()>;

    /// Copies some elements from such a buffer.
    fn copy_from_buffer(&mut self, elements: Range<usize>, buffer: &Buffer, at: usize) -> Result<()>;

    /// Returns it as what kernels work with.
    #[cfg(feature = "cuda")]
    fn as_cuda(&mut self) -> Option<&mut candle_core::CudaStorage> {
        None
    }

    /// Gives the memory back; what is left is of a type that no op computes with.
    fn give_back(&mut self) -> Result<()>;

    /// Replaces what is there by memory for elements, which may hold anything.
    fn allocate(&mut self, dtype: DType, count: usize) -> Result<()>;
}

/// A stream for copies, made when it is first used.
#[derive(Debug, Default)]
pub(super) struct SideStream {
    #[cfg(feature = "cuda")]
    pub(super) stream: super::cuda::LateStream,
}

/// Memory of the host between a tensor and the engine.
#[derive(Debug)]
pub(super) enum HostMemory {
    /// Any memory, for what is on the CPU.
    OnHeap(Buffer),
    /// Memory that a GPU reads and writes.
    #[cfg(feature = "cuda")]
    Pinned(PinnedMemory),
}

impl HostMemory {
    /// Returns the number of bytes.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::OnHeap(memory) => memory.len(),
            #[cfg(feature = "cuda")]
            Self::Pinned(memory) => memory.len(),
        }
    }

    /// Waits for the last copy, and returns room for `count` elements, as it left them.
    pub(super) fn elements(&mut self, dtype: DType, count: usize) -> Result<ElementsMut<'_>> {
        let bytes = match self {
            Self::OnHeap(memory) => memory.as_mut_slice(),
            #[cfg(feature = "cuda")]
            Self::Pinned(memory) => memory.bytes()?,
        };
        ElementsMut::of_bytes(dtype, &mut bytes[..count * dtype.size_in_bytes()])
    }

    /// Shows, where that is cheap, what is read before it was written.
    pub(super) fn spoil(&mut self) {
        match self {
            Self::OnHeap(memory) => memory.as_mut_slice::<u8>().fill(0xff),
            #[cfg(feature = "cuda")]
            Self::Pinned(_) => {}
        }
    }

    fn on_heap(&mut self) -> Result<&mut [u8]> {
        match self {
            Self::OnHeap(memory) => Ok(memory.as_mut_slice()),
            #[cfg(feature = "cuda")]
            Self::Pinned(_) => Err(another_devices()),
        }
    }
}

/// The CPU's memory, taken for a device's.
impl DeviceMemory for CpuStorage {
    fn host_memory(&self, bytes: usize) -> Result<HostMemory> {
        Ok(HostMemory::OnHeap(Buffer::on_heap(bytes)))
    }

    fn holds(&self, dtype: DType, count: usize) -> bool {
        match (self, dtype) {
            (Self::F32(elements), DType::F32) => elements.len() == count,
            (Self::BF16(elements), DType::BF16) => elements.len() == count,
            (Self::F16(elements), DType::F16) => elements.len() == count,
            _ => false,
        }
    }

    fn copy_out(&self, elements: Range<usize>, host: &mut HostMemory) -> Result<()> {
        let source = bytes(self, elements)?;
        host.on_heap()?[..source.len()].copy_from_slice(source);
        Ok(())
    }

    fn copy_out_aside(&self, elements: Range<usize>, host: &mut HostMemory, _: &SideStream) -> Result<()> {
        self.copy_out(elements, host)
    }

    fn copy_in(&mut self, elements: Range<usize>, host: &mut HostMemory) -> Result<()> {
        let target = bytes_mut(self, elements)?;
        target.copy_from_slice(&host.on_heap()?[..target.len()]);
        Ok(())
    }

    fn copy_to_buffer(&self, elements: Range<usize>, buffer: &mut Buffer, at: usize) -> Result<()> {
        let source = bytes(self, elements)?;
        buffer.as_mut_slice::<u8>()[at..at + source.len()].copy_from_slice(source);
        Ok(())
    }

    fn copy_from_buffer(&mut self, elements: Range<usize>, buffer: &Buffer, at: usize) -> Result<()> {
        let target = bytes_mut(self, elements)?;
        target.copy_from_slice(&buffer.as_slice::<u8>()[at..at + target.len()]);
        Ok(())
    }

    fn give_back(&mut self) -> Result<()> {
        *self = Self::F4(Vec::new());
        Ok(())
    }

    fn allocate(&mut self, dtype: DType, count: usize) -> Result<()> {
        *self = zeros(dtype, count)?;
        Ok(())
    }
}

fn bytes(storage: &CpuStorage, elements: Range<usize>) -> Result<&[u8]> {
    match storage {
        CpuStorage::F32(all) => Ok(cast_slice(&all[elements])),
        CpuStorage::BF16(all) => Ok(cast_slice(&all[elements])),
        CpuStorage::F16(all) => Ok(cast_slice(&all[elements])),
        _ => Err(not_managed()),
    }
}

fn bytes_mut(storage: &mut CpuStorage, elements: Range<usize>) -> Result<&mut [u8]> {
    match storage {
        CpuStorage::F32(all) => Ok(cast_slice_mut(&mut all[elements])),
        CpuStorage::BF16(all) => Ok(cast_slice_mut(&mut all[elements])),
        CpuStorage::F16(all) => Ok(cast_slice_mut(&mut all[elements])),
        _ => Err(not_managed()),
    }
}

pub(super) fn not_managed() -> candle_core::Error {
    candle_core::Error::msg(
        "a parameter that is not there (released, or of a dtype that is not managed) was to be copied",
    )
}

#[cfg(feature = "cuda")]
pub(super) fn another_devices() -> candle_core::Error {
    candle_core::Error::msg(
        "host memory for copies belongs to another device: one engine's parameters lie on one device",
    )
}
