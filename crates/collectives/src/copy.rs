//! Copies that bypass the cache, for targets that are large and not in it.
//!
//! An ordinary store first reads the line that it writes. A non-temporal store does not, which saves a third of a large
//! copy's traffic. Such stores are not ordered by ordinary atomics: [`fence_past_cache`] must come before the copy is
//! announced to anyone.

/// Size from which a buffer is taken not to be in cache, in bytes.
pub(crate) const LARGE: usize = 8 << 20;

/// Copies `bytes` bytes; to be followed by [`fence_past_cache`].
///
/// # Safety
/// `source` is valid for reads and `target` for writes of `bytes` bytes, they do not overlap, and nobody else touches
/// the target (or writes the source) meanwhile.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn copy_past_cache(source: *const u8, target: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    const VECTOR: usize = size_of::<__m128i>();
    let head = target.align_offset(64).min(bytes);
    // SAFETY: inside both ranges.
    unsafe { std::ptr::copy_nonoverlapping(source, target, head) };
    let vectors = (bytes - head) / VECTOR;
    let (from, to) = (
        source.wrapping_add(head).cast::<__m128i>(),
        target.wrapping_add(head).cast::<__m128i>(),
    );
    for number in 0..vectors {
        let (from, to) = (from.wrapping_add(number), to.wrapping_add(number));
        // SAFETY: `head + (number + 1) * VECTOR <= bytes`; the load may be unaligned.
        let vector = unsafe { _mm_loadu_si128(from) };
        // SAFETY: as above; the target is 64-byte aligned after the head.
        unsafe { _mm_stream_si128(to, vector) };
    }
    let done = head + vectors * VECTOR;
    let (from, to) = (source.wrapping_add(done), target.wrapping_add(done));
    // SAFETY: inside both ranges.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes - done) };
}

/// Copies `bytes` bytes; to be followed by [`fence_past_cache`].
///
/// # Safety
/// `source` is valid for reads and `target` for writes of `bytes` bytes, they do not overlap, and nobody else touches
/// the target (or writes the source) meanwhile.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn copy_past_cache(source: *const u8, target: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(source, target, bytes) };
}

/// Orders the copies made past the cache before everything that follows.
pub(crate) fn fence_past_cache() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// Asks for lines that will be needed soon; any address is allowed.
#[inline(always)]
pub(crate) fn prefetch(address: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is part of x86-64, and a prefetch of any address is without effect but on caches.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (address, bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_any_length_and_alignment_are_exact() {
        let source: Vec<u8> = (0..400).map(|byte| (byte * 7 % 251) as u8).collect();
        for (start, offset, length) in
            (0..3).flat_map(|s| (0..70).flat_map(move |o| [0, 1, 15, 64, 200].map(|l| (s, o, l))))
        {
            let mut target = vec![255u8; 400];
            let to = target[offset..].as_mut_ptr();
            // SAFETY: both ranges lie in their vectors.
            unsafe { copy_past_cache(source[start..].as_ptr(), to, length) };
            fence_past_cache();
            assert_eq!(target[offset..][..length], source[start..][..length]);
            assert!(
                target[..offset]
                    .iter()
                    .chain(&target[offset + length..])
                    .all(|byte| *byte == 255)
            );
        }
    }
}
