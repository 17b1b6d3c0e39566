//! Unified memory: the same addresses for the host and for a GPU, which keeps the pages as long as only it asks for them.
//!
//! # Who may touch the memory when
//!
//! Borrowing says it for the host, and lending for the GPU. A buffer is lent to a stream by [`Lent`]: at its beginning the
//! stream waits, on the device, for all that the buffer was lent for before; at its end the buffer's event is recorded
//! behind what was put into the stream in between. A lock is held from the one to the other, so that the event is always
//! behind *all* work on the buffer. The host gets at the bytes only after it has waited for that event, and the memory is
//! freed only after that, too.

#![allow(unsafe_code, reason = "memory that the driver allocates, and hands out unset")]

use super::refused;
use crate::{Buffer, Result};
use candle_core::cuda::cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, DriverError, UnifiedSlice, result, sys::CUdevice_attribute,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Allocates unified memory for the work of one stream.
#[derive(Debug)]
pub struct UnifiedMemory {
    stream: Arc<CudaStream>,
    host_accesses: AtomicU64,
}

impl UnifiedMemory {
    /// Makes it for the stream that will mostly work on the memory; `None` where the host cannot look at such memory while
    /// the GPU computes.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) with the driver's reason.
    pub fn of(stream: &Arc<CudaStream>) -> Result<Option<Arc<Self>>> {
        let has = |attribute| stream.context().attribute(attribute).map(|value| value != 0);
        let both = [
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
        ];
        for attribute in both {
            if !has(attribute).map_err(|error| refused(&error))? {
                return Ok(None);
            }
        }
        Ok(Some(Arc::new(Self {
            stream: Arc::clone(stream),
            host_accesses: AtomicU64::new(0),
        })))
    }

    /// Allocates `bytes` zeroed bytes.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) with the driver's reason.
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<Buffer> {
        let unified = Unified::new(self, bytes.max(1)).map_err(|error| refused(&error))?;
        // SAFETY: the allocation begins there and has so many bytes, aligned to a page; they are zeroed before anybody
        // sees them, since who looks waits for the event. It lives as long as `unified`, which only this buffer has.
        Ok(unsafe { Buffer::unified(unified, bytes) })
    }

    /// Returns the stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Returns how often the host has looked at this memory: each time pages may have moved there and back.
    pub fn host_accesses(&self) -> u64 {
        self.host_accesses.load(Relaxed)
    }
}

/// Says whether memory is unified memory, which every GPU here reaches; to be asked only where CUDA is in use, since what
/// is missing there is a panic.
pub fn is_unified(memory: &[u8]) -> bool {
    use candle_core::cuda::cudarc::driver::sys::{CUpointer_attribute, cuPointerGetAttribute};
    let mut is_managed = 0u32;
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED;
    let address = memory.as_ptr().addr() as u64;
    // SAFETY: takes any address, and writes a boolean, of four bytes at most.
    let asked = unsafe { cuPointerGetAttribute((&raw mut is_managed).cast(), attribute, address) };
    // Other memory of the host's is not known to the driver, which is an error.
    asked.result().is_ok() && is_managed != 0
}

/// One allocation.
#[derive(Debug)]
pub(crate) struct Unified {
    memory: UnifiedSlice<u8>,
    pointer: *mut u8,
    /// Recorded behind all work that the memory was lent for.
    last: Mutex<CudaEvent>,
    /// Whether the host has looked since the memory was last lent.
    is_on_host: AtomicBool,
    from: Arc<UnifiedMemory>,
}

// SAFETY: the pointer is that of the allocation, which any thread may use; who may touch the bytes when is on the module's
// page.
unsafe impl Send for Unified {}
// SAFETY: as above; what is shared is behind a lock or atomic.
unsafe impl Sync for Unified {}

impl Unified {
    fn new(from: &Arc<UnifiedMemory>, bytes: usize) -> Result<Self, DriverError> {
        let (stream, context) = (&from.stream, from.stream.context());
        context.bind_to_thread()?;
        let event = context.new_event(None)?;
        // SAFETY: every bit pattern is a byte.
        let mut memory = unsafe { context.alloc_unified::<u8>(bytes, true) }?;
        let pointer = memory.as_mut_slice()?.as_mut_ptr();
        // SAFETY: the allocation has so many bytes, and nobody else has it yet. The GPU touches them first, so that pages
        // come to lie there.
        unsafe { result::memset_d8_async(pointer.addr() as u64, 0, bytes, stream.cu_stream()) }?;
        if let Err(error) = event.record(stream) {
            // The memory is freed now.
            stream.synchronize()?;
            return Err(error);
        }
        Ok(Self {
            memory,
            pointer,
            last: Mutex::new(event),
            is_on_host: AtomicBool::new(false),
            from: Arc::clone(from),
        })
    }

    pub(crate) fn pointer(&self) -> *mut u8 {
        self.pointer
    }

    /// Waits until nothing on the device works with the memory.
    ///
    /// # Panics
    /// When the driver cannot wait: what the device does is unknown then.
    pub(crate) fn wait(&self) {
        let waited = self.lock().synchronize();
        waited.expect("work on the GPU ends; see the driver's error, which all later calls report");
    }

    /// Does so for the host, which looks at the memory next.
    pub(crate) fn wait_for_host(&self) {
        self.from.host_accesses.fetch_add(1, Relaxed);
        self.is_on_host.store(true, Relaxed);
        self.wait();
    }

    /// Lends the memory to what is put into a stream of the same device until the result is dropped.
    pub(crate) fn lend<'u>(&'u self, stream: &Arc<CudaStream>) -> Result<Lent<'u>> {
        let last = self.lock();
        let waits = || {
            stream.context().bind_to_thread()?;
            if self.is_on_host.swap(false, Relaxed) {
                self.memory.prefetch()?;
            }
            stream.wait(&last)
        };
        waits().map_err(|error| refused(&error))?;
        Ok(Lent {
            pointer: self.pointer.addr() as u64,
            last,
            stream: Arc::clone(stream),
        })
    }

    fn lock(&self) -> MutexGuard<'_, CudaEvent> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Unified {
    fn drop(&mut self) {
        let context: &Arc<CudaContext> = self.from.stream.context();
        // Freeing needs the context; a failed wait is the context's failure, after which nothing runs.
        context.record_err(context.bind_to_thread());
        let waited = self.lock().synchronize();
        context.record_err(waited);
    }
}

/// A buffer that work in a stream has, from its making to its end.
///
/// Must be dropped, not forgotten: the buffer learns of the work then.
#[derive(Debug)]
#[must_use]
pub struct Lent<'b> {
    pointer: u64,
    last: MutexGuard<'b, CudaEvent>,
    stream: Arc<CudaStream>,
}

impl Lent<'_> {
    /// Returns the address, for kernels and copies that are put into the stream before this is dropped.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.last.record(&self.stream) {
            let context = self.stream.context();
            context.record_err::<()>(Err(error));
            context.record_err(self.stream.synchronize());
        }
    }
}
