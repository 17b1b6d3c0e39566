//! Copies between a caller's memory and the segment.

use super::segment::Segment;
use crate::private::Private;

impl Private {
    /// Copies this range into the segment.
    pub(super) fn copy_to(&self, segment: &Segment, slot: usize, offset: usize) {
        let target = segment.bytes(slot, offset, self.len());
        // SAFETY: the range is lent for the operation (`Private`'s page); the target is inside the segment and this rank's
        // to write now (segment's module page).
        unsafe { copy_by_blocks(self.pointer(), target, self.len()) };
    }

    /// Fills this range from the segment.
    pub(super) fn copy_from(&self, segment: &Segment, slot: usize, offset: usize) {
        assert!(self.is_writable(), "the range was lent for writing");
        let source = segment.bytes(slot, offset, self.len());
        // SAFETY: as `copy_to`, the other way round; the range was lent for writing.
        unsafe { copy_by_blocks(source, self.pointer(), self.len()) };
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
