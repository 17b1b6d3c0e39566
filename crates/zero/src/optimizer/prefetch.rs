//! Asking for memory ahead of a loop.
//!
//! Where a root and a division per element fill the processor's window of instructions, it looks too little ahead to
//! keep memory busy, and its own prefetchers stop at every page. Measured by `cargo xtask bench optimizer`.

#![allow(unsafe_code, reason = "a prefetch is an intrinsic that takes a pointer")]

/// Elements between two requests: more at once would wait for each other.
pub(super) const STRIDE: usize = 64;
/// Elements between those at hand and those asked for: at most 2 KiB, so that five streams take little of any
/// first-level cache.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 512;
/// Bytes that one request brings.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Asks for the elements some way after these; there need not be any. Does nothing where it cannot be asked.
#[inline(always)]
pub(super) fn prefetch_after<T>(elements: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..elements.len()).step_by(LINE / size_of::<T>()) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let address = elements.as_ptr().wrapping_add(AHEAD + line).cast();
        // SAFETY: SSE is part of x86-64, and a prefetch of any address is without effect but on caches.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = elements;
}
