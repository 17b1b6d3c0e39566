//! A caller's memory for the length of one operation, as an address range.
//!
//! Operations hand parts of the caller's buffer to kernels, to copies, and (in regions) to peers. Slices for all of
//! them would overlap; an address range does not claim more than it uses.
//!
//! # Safety
//! A [`Private`] is made from a slice that the caller has lent for the whole operation, lives no longer than it (it is
//! never stored), and writes only if made from a mutable slice.

use super::segment::Segment;
use super::staged::Part;

/// A range of the caller's memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Private {
    start: *mut u8,
    length: usize,
    writable: bool,
}

impl Private {
    pub(super) fn of(bytes: &[u8]) -> Self {
        Self {
            start: bytes.as_ptr().cast_mut(),
            length: bytes.len(),
            writable: false,
        }
    }

    pub(super) fn of_mut(bytes: &mut [u8]) -> Self {
        Self {
            start: bytes.as_mut_ptr(),
            length: bytes.len(),
            writable: true,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.length
    }

    pub(super) fn whole(&self) -> Part {
        0..self.length
    }

    pub(super) fn pointer(&self) -> *mut u8 {
        self.start
    }

    /// Returns a range of this range.
    pub(super) fn part(&self, part: Part) -> Self {
        assert!(
            part.start <= part.end && part.end <= self.length,
            "{part:?} is inside {} bytes",
            self.length
        );
        Self {
            start: self.start.wrapping_add(part.start),
            length: part.len(),
            writable: self.writable,
        }
    }

    /// Copies this range into the segment.
    pub(super) fn copy_to(&self, segment: &Segment, slot: usize, offset: usize) {
        let target = segment.bytes(slot, offset, self.length);
        // SAFETY: the range is lent for the operation (module page); the target is inside the segment and this rank's
        // to write now (segment's module page).
        unsafe { copy_by_blocks(self.start, target, self.length) };
    }

    /// Fills this range from the segment.
    pub(super) fn copy_from(&self, segment: &Segment, slot: usize, offset: usize) {
        assert!(self.writable, "the range was lent for writing");
        let source = segment.bytes(slot, offset, self.length);
        // SAFETY: as `copy_to`, the other way round; the range was lent for writing.
        unsafe { copy_by_blocks(source, self.start, self.length) };
    }

    /// Fills this range from another of the same length; the two may be the same.
    pub(super) fn copy_between(&self, source: &Self) {
        assert!(
            self.writable && self.length == source.length,
            "a writable range of the source's length"
        );
        // SAFETY: both ranges are lent for the operation, this one for writing.
        unsafe { std::ptr::copy(source.start, self.start, self.length) };
    }
}

/// Copies in blocks that the C library copies with vector instructions.
///
/// For longer ones it takes `rep movsb`, which is slow where another core holds the target's lines.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
unsafe fn copy_by_blocks(source: *const u8, target: *mut u8, bytes: usize) {
    const BLOCK: usize = 4096;
    for at in (0..bytes).step_by(BLOCK) {
        let length = BLOCK.min(bytes - at);
        // SAFETY: inside both ranges, for which the caller vouches.
        unsafe { std::ptr::copy_nonoverlapping(source.wrapping_add(at), target.wrapping_add(at), length) };
    }
}
