//! Memory that a communicator allocated, so that peers can reach it in place where the backend allows that.

use crate::Element;
#[cfg(feature = "cuda")]
use crate::Result;
use std::sync::Arc;

/// Owned, zero-initialised memory, aligned to at least 64 bytes.
///
/// From the shared-memory backend it lies in a segment that all ranks of the host have mapped, and collectives on it
/// need no staging copies. With the feature `cuda` it may be unified memory of a GPU (`cuda::UnifiedMemory`): whoever looks
/// at it waits for the work that it was lent for. Otherwise it is ordinary heap memory.
pub struct Buffer {
    pointer: *mut u8,
    bytes: usize,
    _owner: Owner,
}

/// What keeps a buffer's memory alive.
enum Owner {
    Heap {
        _memory: Vec<Line>,
    },
    Shared {
        _mapping: Arc<dyn Send + Sync>,
    },
    #[cfg(feature = "cuda")]
    Unified(crate::cuda::Unified),
}

/// A cache line, for alignment.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: a buffer owns its bytes: they are reached through `&self` for reads and `&mut self` for writes, as with a
// `Vec<u8>`. Peers touch shared bytes only inside an operation that this rank has entered with that buffer; a GPU touches
// unified ones only while it has them (`cuda/unified.rs`), and who looks at the bytes waits for that to end.
unsafe impl Send for Buffer {}
// SAFETY: as above; `&Buffer` only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `bytes` zeroed bytes on the heap.
    pub fn on_heap(bytes: usize) -> Self {
        let mut memory = vec![Line([0; 64]); bytes.div_ceil(64)];
        Self {
            pointer: memory.as_mut_ptr().cast(),
            bytes,
            _owner: Owner::Heap { _memory: memory },
        }
    }

    /// Takes over `bytes` bytes of a shared mapping.
    ///
    /// # Safety
    /// `pointer` is 64-byte aligned, valid for `bytes` initialised bytes as long as `mapping` lives, and this buffer is
    /// the only one of this rank for these bytes.
    pub(crate) unsafe fn shared(pointer: *mut u8, bytes: usize, mapping: Arc<dyn Send + Sync>) -> Self {
        Self {
            pointer,
            bytes,
            _owner: Owner::Shared { _mapping: mapping },
        }
    }

    /// Takes over unified memory of at least `bytes` bytes.
    ///
    /// # Safety
    /// The memory's pointer is 64-byte aligned, valid for `bytes` bytes as long as `memory` lives, and they are initialised
    /// once `memory` has been waited for.
    #[cfg(feature = "cuda")]
    pub(crate) unsafe fn unified(memory: crate::cuda::Unified, bytes: usize) -> Self {
        Self {
            pointer: memory.pointer(),
            bytes,
            _owner: Owner::Unified(memory),
        }
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Says whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Says whether the memory lies in a segment that peers have mapped.
    pub fn is_shared(&self) -> bool {
        matches!(self._owner, Owner::Shared { .. })
    }

    /// Says whether the memory is unified memory of a GPU.
    pub fn is_unified(&self) -> bool {
        #[cfg(feature = "cuda")]
        return matches!(self._owner, Owner::Unified(_));
        #[cfg(not(feature = "cuda"))]
        false
    }

    /// Lends unified memory to work that is put into a stream, for reading, until the result is dropped: a second lending
    /// waits for that.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for other memory, and with the driver's reason.
    #[cfg(feature = "cuda")]
    pub fn lend(&self, stream: &Arc<candle_core::cuda::cudarc::driver::CudaStream>) -> Result<crate::cuda::Lent<'_>> {
        match &self._owner {
            Owner::Unified(memory) => memory.lend(stream),
            _ => Err(crate::Error::Unsupported {
                what: "memory of the host's was to be lent to a GPU".into(),
                hint: "allocate it with UnifiedMemory".into(),
            }),
        }
    }

    /// Lends unified memory as [`Buffer::lend`] does, also for writing.
    ///
    /// # Errors
    /// As [`Buffer::lend`].
    #[cfg(feature = "cuda")]
    pub fn lend_mut(
        &mut self,
        stream: &Arc<candle_core::cuda::cudarc::driver::CudaStream>,
    ) -> Result<crate::cuda::Lent<'_>> {
        self.lend(stream)
    }

    /// Views the memory as elements that are handed to a collective, which may work on them where they lie.
    pub fn for_peers<T: Element>(&mut self) -> &mut [T] {
        #[cfg(feature = "cuda")]
        if let Owner::Unified(memory) = &self._owner {
            memory.wait();
        }
        self.elements_mut()
    }

    /// Views the memory as elements; bytes that do not fill an element are left out.
    pub fn as_slice<T: Element>(&self) -> &[T] {
        self.wait_for_host();
        self.elements()
    }

    /// Views the memory as elements for writing; bytes that do not fill an element are left out.
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        self.wait_for_host();
        self.elements_mut()
    }

    #[inline(always)]
    fn wait_for_host(&self) {
        #[cfg(feature = "cuda")]
        if let Owner::Unified(memory) = &self._owner {
            memory.wait_for_host();
        }
    }

    /// Nothing on a device may work with the memory when this is called.
    fn elements<T: Element>(&self) -> &[T] {
        // SAFETY: the pointer is aligned and valid for `bytes` initialised bytes, every bit pattern is a `T` (`Pod`), and
        // `&self` keeps writers away: a device gets the memory for writing only through `&mut self`, and has been waited
        // for.
        unsafe { std::slice::from_raw_parts(self.pointer.cast(), self.bytes / T::TYPE.size()) }
    }

    /// As above.
    fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        // SAFETY: as `elements`, and `&mut self` keeps readers away too.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast(), self.bytes / T::TYPE.size()) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer")
            .field("bytes", &self.bytes)
            .field("shared", &self.is_shared())
            .field("unified", &self.is_unified())
            .finish()
    }
}
