//! Memory that a communicator allocated, so that peers can reach it in place where the backend allows that.

use crate::Element;
use std::sync::Arc;

/// Owned, zero-initialised memory, aligned to at least 64 bytes.
///
/// From the shared-memory backend it lies in a segment that all ranks of the host have mapped, and collectives on it
/// need no staging copies. Otherwise it is ordinary heap memory.
pub struct Buffer {
    pointer: *mut u8,
    bytes: usize,
    _owner: Owner,
}

/// What keeps a buffer's memory alive.
enum Owner {
    Heap { _memory: Vec<Line> },
    Shared { _mapping: Arc<dyn Send + Sync> },
}

/// A cache line, for alignment.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

// SAFETY: a buffer owns its bytes: they are reached through `&self` for reads and `&mut self` for writes, as with a
// `Vec<u8>`. Peers touch shared bytes only inside an operation that this rank has entered with that buffer.
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

    /// Views the memory as elements; bytes that do not fill an element are left out.
    pub fn as_slice<T: Element>(&self) -> &[T] {
        // SAFETY: the pointer is aligned and valid for `bytes` initialised bytes, every bit pattern is a `T` (`Pod`),
        // and `&self` keeps writers away.
        unsafe { std::slice::from_raw_parts(self.pointer.cast(), self.bytes / T::TYPE.size()) }
    }

    /// Views the memory as elements for writing; bytes that do not fill an element are left out.
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        // SAFETY: as `as_slice`, and `&mut self` keeps readers away too.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast(), self.bytes / T::TYPE.size()) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer")
            .field("bytes", &self.bytes)
            .field("shared", &self.is_shared())
            .finish()
    }
}
