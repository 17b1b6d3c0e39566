//! The shared segment: its layout, and the only places where its memory is touched.
//!
//! A segment is an anonymous memory file (`memfd`) that every rank of a group maps. It has no name in any file system,
//! so nothing can leak and nothing stale can be opened; ranks hand the descriptor to each other (`descriptors`).
//!
//! # Safety
//! Other threads and processes write the segment while we hold it, so no Rust reference to its bytes exists outside
//! kernels, copies and [`Buffer`](crate::Buffer)s. Who may touch which bytes when:
//!
//! - the control block and rank lines are atomics, always;
//! - rank r's small slots and stage slots are written by r before it publishes the epoch that announces them, and read
//!   by peers between seeing that epoch and publishing their own next one (the argument for the number of slots is in
//!   the module page);
//! - chunk r of a stage slot of an all-reduce is written by rank r alone after the inputs were announced;
//! - a mailbox piece is written by its sender while free (`head - tail < PIECES`) and read by its receiver while full.

use super::layout::{Layout, RankLine};
use crate::{Error, Result};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// A mapping of an anonymous memory file, unmapped on drop.
#[derive(Debug)]
pub(super) struct Mapping {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: a mapping is an address range; what may be touched when is argued in the module page.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Creates a zeroed memory file of `bytes` bytes.
    ///
    /// With `reserve` the memory is allocated at once, so that its lack is an error here and not a signal later.
    pub(super) fn create_file(bytes: usize, reserve: bool) -> Result<OwnedFd> {
        let failed = |what: &str, errno: rustix::io::Errno| Error::Io {
            context: format!("{what} of {bytes} bytes of shared memory"),
            source: errno.into(),
        };
        let file = memfd_create("sconce", MemfdFlags::CLOEXEC).map_err(|e| failed("creation", e))?;
        ftruncate(&file, bytes as u64).map_err(|e| failed("sizing", e))?;
        if reserve {
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes as u64)
                .map_err(|e| failed("reservation", e))?;
        }
        Ok(file)
    }

    /// Maps a memory file of at least `bytes` bytes.
    pub(super) fn map(file: impl AsFd, bytes: usize, populate: bool) -> Result<Self> {
        let io = |context: &str, errno: rustix::io::Errno| Error::Io {
            context: context.into(),
            source: errno.into(),
        };
        let size = rustix::fs::fstat(&file)
            .map_err(|e| io("size of the shared segment", e))?
            .st_size;
        if (size as u64) < bytes as u64 {
            return Err(Error::Unsupported {
                what: format!("shared segment of {size} bytes where {bytes} were expected"),
                hint: "start all ranks from the same build".into(),
            });
        }
        let flags = if populate {
            MapFlags::SHARED | MapFlags::POPULATE
        } else {
            MapFlags::SHARED
        };
        // SAFETY: a fresh mapping at an address of the kernel's choice, of a file that is long enough (checked above)
        // and that no one shrinks: descriptors go only to ranks, and no code here truncates after creation.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
                file,
                0,
            )
        }
        .map_err(|e| io("mapping of the shared segment", e))?;
        // SAFETY: the range is the mapping just made; the advice changes no contents. Failure costs only speed.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxHugepage) };
        Ok(Self {
            base: base.cast(),
            bytes,
        })
    }

    /// Returns the address of byte `offset`, of which `length` bytes are inside the mapping.
    pub(super) fn at(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(
            offset.checked_add(length).is_some_and(|end| end <= self.bytes),
            "range inside the mapping"
        );
        // SAFETY: inside the mapping, as asserted.
        unsafe { self.base.add(offset) }
    }

    /// Returns the bytes' number in this mapping if `pointer..pointer + length` lies in it.
    pub(super) fn offset_of(&self, pointer: *const u8, length: usize) -> Option<usize> {
        let offset = (pointer as usize).checked_sub(self.base as usize)?;
        (offset.checked_add(length)? <= self.bytes).then_some(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` and no pointer into it outlives the owner, which every `Buffer` and
        // communicator keeps by `Arc`.
        let _ = unsafe { munmap(self.base.cast(), self.bytes) };
    }
}

/// The control segment of a group.
#[derive(Debug)]
pub(super) struct Segment {
    mapping: Mapping,
    layout: Layout,
}

impl Segment {
    pub(super) fn create_file(layout: &Layout) -> Result<OwnedFd> {
        Mapping::create_file(layout.bytes(), false)
    }

    pub(super) fn map(file: impl AsFd, layout: Layout) -> Result<Self> {
        Ok(Self {
            mapping: Mapping::map(file, layout.bytes(), false)?,
            layout,
        })
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the words that all ranks share.
    pub(super) fn control(&self) -> &super::layout::Control {
        let pointer = self.mapping.at(0, size_of::<super::layout::Control>());
        // SAFETY: inside the mapping, page-aligned, consists of atomics only, valid in every bit pattern.
        unsafe { &*pointer.cast() }
    }

    /// Returns the words that `rank` publishes.
    pub(super) fn line(&self, rank: usize) -> &RankLine {
        let pointer = self.mapping.at(self.layout.line(rank), size_of::<RankLine>());
        // SAFETY: as `control`; lines are 128-byte aligned by the layout.
        unsafe { &*pointer.cast() }
    }

    /// Returns a mailbox's counters: pieces sent, pieces consumed.
    pub(super) fn mailbox_counters(&self, from: usize, to: usize) -> (&AtomicU32, &AtomicU32) {
        let head = self.mapping.at(self.layout.mailbox(from, to), 256).cast::<AtomicU32>();
        // SAFETY: inside the mapping, aligned, atomics only.
        let sent = unsafe { &*head };
        let consumed = head.wrapping_byte_add(128);
        // SAFETY: as above; 128 bytes on, inside the 256 checked.
        let consumed = unsafe { &*consumed };
        (sent, consumed)
    }

    /// Returns the signature words of mailbox piece `piece`: packed word and count.
    pub(super) fn mailbox_signature(&self, from: usize, to: usize, piece: usize) -> (&AtomicU64, &AtomicU64) {
        let at = self
            .mapping
            .at(self.layout.mailbox_signature(from, to, piece), 16)
            .cast::<AtomicU64>();
        // SAFETY: inside the mapping, 16-byte aligned, atomics only.
        let word = unsafe { &*at };
        let count = at.wrapping_add(1);
        // SAFETY: as above, the next eight bytes.
        let count = unsafe { &*count };
        (word, count)
    }

    /// Returns the address of `length` bytes at `offset` of a slot that starts at `slot`.
    pub(super) fn bytes(&self, slot: usize, offset: usize, length: usize) -> *mut u8 {
        self.mapping.at(slot + offset, length)
    }
}
