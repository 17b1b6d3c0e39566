//! Asking for memory ahead of a loop.
//!
//! Where a root and a division per element fill the processor's window of instructions, it looks too little ahead to
//! keep memory busy, and its own prefetchers stop at every page. Measured by `cargo xtask bench optimizer`.

#![allow(unsafe_code, reason = "a prefetch is an intrinsic that takes a pointer")]

/// Elements between two requests.
pub(super) const PIECE: usize = 64;
/// Pieces between the one at hand and the one asked for: 2 KiB, so that four streams take little of any first-level
/// cache.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 8;

/// Asks for the elements some pieces after this one; there need not be any. Does nothing where it cannot be asked.
#[inline(always)]
pub(super) fn prefetch_after(piece: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..piece.len()).step_by(16) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let address = piece.as_ptr().wrapping_add(AHEAD * PIECE + line).cast();
        // SAFETY: SSE is part of x86-64, and a prefetch of any address is without effect but on caches.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = piece;
}
