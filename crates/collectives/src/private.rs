//! A caller's memory for the length of one operation, as an address range.
//!
//! Operations hand parts of the caller's buffer to kernels, to copies, and (in regions) to peers. Slices for all of
//! them would overlap; an address range does not claim more than it uses.
//!
//! # Safety
//! A [`Private`] is made from a slice that the caller has lent for the whole operation, lives no longer than it (it is
//! never stored), and writes only if made from a mutable slice. One that goes to another thread is waited for before the
//! operation ends, whether it fails or not.

use crate::parts::Part;

/// A range of the caller's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Private {
    start: *mut u8,
    length: usize,
    writable: bool,
}

// SAFETY: bytes may be touched from any thread; that nobody does after the operation is on the module's page.
unsafe impl Send for Private {}

impl Private {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self {
            start: bytes.as_ptr().cast_mut(),
            length: bytes.len(),
            writable: false,
        }
    }

    pub(crate) fn of_mut(bytes: &mut [u8]) -> Self {
        Self {
            start: bytes.as_mut_ptr(),
            length: bytes.len(),
            writable: true,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.length
    }

    pub(crate) fn whole(&self) -> Part {
        0..self.length
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    pub(crate) fn pointer(&self) -> *mut u8 {
        self.start
    }

    /// Returns a range of this range.
    pub(crate) fn part(&self, part: Part) -> Self {
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

    /// Fills this range from another of the same length; the two may be the same.
    pub(crate) fn copy_between(&self, source: &Self) {
        assert!(
            self.writable && self.length == source.length,
            "a writable range of the source's length"
        );
        // SAFETY: both ranges are lent for the operation, this one for writing.
        unsafe { std::ptr::copy(source.start, self.start, self.length) };
    }
}
