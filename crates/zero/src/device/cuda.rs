//! Memory of a CUDA device, and host memory that it reads and writes.

#![allow(
    unsafe_code,
    reason = "memory comes unset from the driver, and is lent to copies that outlast a call"
)]

use super::gpu::{copy_from_buffer, copy_to_buffer};
use super::memory::{DeviceMemory, HostMemory, SideStream, another_devices, not_managed};
use bytemuck::{Pod, cast_slice, cast_slice_mut};
use candle_core::cuda::cudarc::driver::sys::CUmemPool_attribute;
use candle_core::cuda::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DeviceRepr, HostSlice, PinnedHostSlice, SyncOnDrop, result,
};
use candle_core::cuda::{CudaStorageSlice as Slice, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Result};
use half::{bf16, f16};
use sconce_collectives::Buffer;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Host memory is allocated by so many bytes.
const GRAIN: usize = 1 << 16;

/// The handle that stands for another stream in each thread.
const STREAM_PER_THREAD: usize = 2;

/// Prepares a device for parameters.
pub(super) fn prepare(device: &CudaDevice) -> Result<()> {
    let stream = device.cuda_stream();
    if stream.cu_stream() as usize == STREAM_PER_THREAD {
        candle_core::bail!(
            "managed parameters need a device with one stream for all threads: make it with Device::new_cuda_with_stream \
             in place of Device::new_cuda"
        );
    }
    keep_what_is_freed(stream.context()).w()
}

/// Has the device's pool keep what tensors free; by default it gives that back to the driver whenever the host waits for
/// the device, which the engine does for every gradient.
fn keep_what_is_freed(context: &CudaContext) -> std::result::Result<(), result::DriverError> {
    if !context.has_async_alloc() {
        return Ok(());
    }
    context.bind_to_thread()?;
    let mut threshold = u64::MAX;
    // SAFETY: the device is the context's, and has pools.
    let pool = unsafe { result::device::get_mem_pool(context.cu_device()) }?;
    let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the pool lasts as long as the device, and the attribute is a `u64`, which the call reads.
    unsafe { result::mem_pool::set_attribute(pool, attribute, (&raw mut threshold).cast()) }
}

impl DeviceMemory for CudaStorage {
    fn host_memory(&self, bytes: usize) -> Result<HostMemory> {
        let stream = self.device.cuda_stream();
        Ok(HostMemory::Pinned(PinnedMemory::new(stream.context(), bytes)?))
    }

    fn holds(&self, dtype: DType, count: usize) -> bool {
        match (&self.slice, dtype) {
            (Slice::F32(elements), DType::F32) => elements.len() == count,
            (Slice::BF16(elements), DType::BF16) => elements.len() == count,
            (Slice::F16(elements), DType::F16) => elements.len() == count,
            _ => false,
        }
    }

    fn copy_out(&self, elements: Range<usize>, host: &mut HostMemory) -> Result<()> {
        copy_storage_out(&self.device.cuda_stream(), self, elements, host)
    }

    fn copy_out_aside(&self, elements: Range<usize>, host: &mut HostMemory, side: &SideStream) -> Result<()> {
        let computing = self.device.cuda_stream();
        let side = side.stream.of(computing.context())?;
        side.join(&computing).w()?;
        copy_storage_out(side, self, elements, host)
    }

    fn copy_in(&mut self, elements: Range<usize>, host: &mut HostMemory) -> Result<()> {
        let stream = self.device.cuda_stream();
        match &mut self.slice {
            Slice::F32(all) => copy_in(&stream, all, elements, host),
            Slice::BF16(all) => copy_in(&stream, all, elements, host),
            Slice::F16(all) => copy_in(&stream, all, elements, host),
            _ => Err(not_managed()),
        }
    }

    fn copy_to_buffer(&self, elements: Range<usize>, buffer: &mut Buffer, at: usize) -> Result<()> {
        copy_to_buffer(self, elements, buffer, at)
    }

    fn copy_from_buffer(&mut self, elements: Range<usize>, buffer: &Buffer, at: usize) -> Result<()> {
        copy_from_buffer(self, elements, buffer, at)
    }

    fn as_cuda(&mut self) -> Option<&mut CudaStorage> {
        Some(self)
    }

    fn give_back(&mut self) -> Result<()> {
        // Of a byte, since what no memory at all is differs between drivers.
        self.slice = Slice::F4(self.device.alloc_zeros::<u8>(1)?);
        Ok(())
    }

    fn allocate(&mut self, dtype: DType, count: usize) -> Result<()> {
        self.slice = match dtype {
            DType::F32 => Slice::F32(unset(&self.device, count)?),
            DType::BF16 => Slice::BF16(unset::<bf16>(&self.device, count)?),
            DType::F16 => Slice::F16(unset::<f16>(&self.device, count)?),
            _ => return Err(not_managed()),
        };
        Ok(())
    }
}

/// A stream that is made for the context which first asks for it.
#[derive(Debug, Default)]
pub(super) struct LateStream(OnceLock<Arc<CudaStream>>);

impl LateStream {
    fn of(&self, context: &Arc<CudaContext>) -> Result<&Arc<CudaStream>> {
        if self.0.get().is_none() {
            // Another thread's may have been first; this one is then dropped.
            self.0.get_or_init({
                let stream = context.new_stream().w()?;
                || stream
            });
        }
        self.0
            .get()
            .filter(|stream| stream.context() == context)
            .ok_or_else(another_devices)
    }
}

fn copy_storage_out(
    stream: &Arc<CudaStream>,
    storage: &CudaStorage,
    elements: Range<usize>,
    host: &mut HostMemory,
) -> Result<()> {
    match &storage.slice {
        Slice::F32(all) => copy_out(stream, all, elements, host),
        Slice::BF16(all) => copy_out(stream, all, elements, host),
        Slice::F16(all) => copy_out(stream, all, elements, host),
        _ => Err(not_managed()),
    }
}

fn unset<T: Pod + DeviceRepr>(device: &CudaDevice, count: usize) -> Result<CudaSlice<T>> {
    // SAFETY: every bit pattern is a number, and the host never refers to memory of the device: what is computed with
    // unset memory would be some number. Whoever allocates writes it all before that.
    unsafe { device.alloc::<T>(count) }
}

fn copy_out<T: Pod + DeviceRepr>(
    stream: &Arc<CudaStream>,
    all: &CudaSlice<T>,
    elements: Range<usize>,
    host: &mut HostMemory,
) -> Result<()> {
    if elements.is_empty() {
        return Ok(());
    }
    let mut target = part_of(host, elements.len() * size_of::<T>())?;
    let source = all.try_slice(elements).ok_or_else(not_managed)?;
    stream.memcpy_dtoh(&source, &mut target).w()
}

fn copy_in<T: Pod + DeviceRepr>(
    stream: &Arc<CudaStream>,
    all: &mut CudaSlice<T>,
    elements: Range<usize>,
    host: &mut HostMemory,
) -> Result<()> {
    if elements.is_empty() {
        return Ok(());
    }
    let source = part_of(host, elements.len() * size_of::<T>())?;
    let mut target = all.try_slice_mut(elements).ok_or_else(not_managed)?;
    stream.memcpy_htod(&source, &mut target).w()
}

fn part_of(host: &mut HostMemory, bytes: usize) -> Result<Part<'_>> {
    match host {
        HostMemory::Pinned(PinnedMemory { memory }) => Ok(Part { memory, bytes }),
        HostMemory::OnHeap(_) => Err(another_devices()),
    }
}

/// Page-locked memory of the host, which knows of the last copy from or to it.
///
/// Its event is recorded behind every copy ([`Part`]), and waited for before the host comes to the bytes, before the next
/// copy, and before the memory is freed.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    memory: PinnedHostSlice<u8>,
}

impl PinnedMemory {
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(GRAIN);
        // Without flags: memory that the host also reads should be cached.
        // SAFETY: the memory is unset; all of it is written before it can be reached.
        let mut memory = unsafe { context.alloc_pinned_with_flags::<u8>(bytes, 0) }.w()?;
        let start = memory.as_mut_ptr().w()?;
        // SAFETY: `start` is where the allocation of so many bytes begins, which nobody else has.
        unsafe { start.write_bytes(0, bytes) };
        Ok(Self { memory })
    }

    pub(super) fn len(&self) -> usize {
        self.memory.len()
    }

    /// Waits for the last copy and returns the bytes.
    pub(super) fn bytes(&mut self) -> Result<&mut [u8]> {
        self.memory.as_mut_slice().w()
    }
}

/// The first bytes of page-locked memory, as numbers that are copied.
struct Part<'p> {
    memory: &'p mut PinnedHostSlice<u8>,
    bytes: usize,
}

impl<T: Pod> HostSlice<T> for Part<'_> {
    fn len(&self) -> usize {
        self.bytes / size_of::<T>()
    }

    unsafe fn stream_synced_slice<'a>(&'a self, stream: &'a CudaStream) -> (&'a [T], SyncOnDrop<'a>) {
        // SAFETY: the caller uses the slice with `stream` only, which is what the call asks for.
        let (all, copied) = unsafe { self.memory.stream_synced_slice(stream) };
        (cast_slice(&all[..self.bytes]), copied)
    }

    unsafe fn stream_synced_mut_slice<'a>(&'a mut self, stream: &'a CudaStream) -> (&'a mut [T], SyncOnDrop<'a>) {
        // SAFETY: the caller uses the slice with `stream` only, which is what the call asks for.
        let (all, copied) = unsafe { self.memory.stream_synced_mut_slice(stream) };
        (cast_slice_mut(&mut all[..self.bytes]), copied)
    }
}
