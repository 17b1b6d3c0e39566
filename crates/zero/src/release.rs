//! Giving back the memory of a tensor's elements while the tensor stays what it is.
//!
//! A gathered parameter is released by telling the system that its pages are not needed: they read as zeros until they
//! are written again, and take no memory. The tensor keeps its address, its length and its lock, so no op of any thread
//! can ever reach memory that is not there: an op that uses a released parameter computes nonsense, it does not break
//! memory. That it shows is seen to by what is *not* given back: the bytes before the first and after the last whole page
//! become 0xff, which is not a number in f32, bf16 and f16.

#![allow(unsafe_code, reason = "pages are given back by address")]

use crate::storage::with_bytes;
use candle_core::{Result, Tensor};
use sconce_collectives::Buffer;

/// Bytes at the front that always stay, and are no numbers.
const MARK: usize = 64;

/// Makes all elements nonsense and gives back the memory of most of them.
pub(crate) fn release(tensor: &Tensor) -> Result<()> {
    with_bytes(tensor, release_bytes)
}

/// Does so with a buffer on the heap that is freed next: the allocator may keep its memory, but not in use.
pub(crate) fn release_buffer(mut buffer: Buffer) {
    if !buffer.is_shared() && !buffer.is_unified() {
        release_bytes(buffer.as_mut_slice());
    }
}

/// Makes all elements nonsense as [`release`] does, and keeps the memory: between its ends old values may stay.
pub(crate) fn spoil(tensor: &Tensor) -> Result<()> {
    with_bytes(tensor, |bytes| {
        mark(bytes);
    })
}

fn release_bytes(bytes: &mut [u8]) {
    let pages = mark(bytes);
    give_back(&mut bytes[pages]);
}

/// Makes the bytes before the first and after the last whole page no numbers; returns the pages between.
fn mark(bytes: &mut [u8]) -> std::ops::Range<usize> {
    let pages = whole_pages(bytes);
    bytes[..pages.start].fill(0xff);
    bytes[pages.end..].fill(0xff);
    pages
}

/// Returns the range of whole pages behind the mark.
#[cfg(target_os = "linux")]
fn whole_pages(bytes: &[u8]) -> std::ops::Range<usize> {
    let page = rustix::param::page_size();
    let address = bytes.as_ptr().addr();
    let start = (address + MARK).next_multiple_of(page) - address;
    let end = ((address + bytes.len()) / page * page).saturating_sub(address);
    if start < end {
        start..end
    } else {
        bytes.len()..bytes.len()
    }
}

#[cfg(target_os = "linux")]
fn give_back(pages: &mut [u8]) {
    use rustix::mm::{Advice, madvise};
    if pages.is_empty() {
        return;
    }
    // SAFETY: `pages` are whole pages of a vector's heap memory, which is private and anonymous, held by `&mut`: the
    // system may replace them by pages of zeros, which is what writing zeros through the reference would do.
    let outcome = unsafe { madvise(pages.as_mut_ptr().cast(), pages.len(), Advice::LinuxDontNeed) };
    if outcome.is_err() {
        // Locked memory, for example: the parameter stays, and is nonsense like elsewhere.
        pages.fill(0xff);
    }
}

/// Other systems keep the memory.
#[cfg(not(target_os = "linux"))]
fn whole_pages(bytes: &[u8]) -> std::ops::Range<usize> {
    bytes.len()..bytes.len()
}

#[cfg(not(target_os = "linux"))]
fn give_back(_pages: &mut [u8]) {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::with_values;
    use candle_core::Device;

    /// Pages of this process that are in memory, in bytes.
    #[cfg(target_os = "linux")]
    fn resident() -> usize {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: usize = text.split_whitespace().nth(1).unwrap().parse().unwrap();
        pages * rustix::param::page_size()
    }

    #[test]
    fn a_released_tensor_is_not_a_number_at_both_ends_and_can_be_filled_again() {
        for count in [1, 15, 16, 1000, 1024, 5000, 100_003] {
            let tensor = Tensor::ones(count, candle_core::DType::F32, &Device::Cpu).unwrap();
            let view = tensor.reshape((1, count)).unwrap();
            release(&tensor).unwrap();
            let released: Vec<f32> = view.flatten_all().unwrap().to_vec1().unwrap();
            assert!(released[0].is_nan() && released.iter().all(|value| value.is_nan() || *value == 0.0));
            with_values(&tensor, |values| values.round_from(&vec![3.0; count])).unwrap();
            let sum: f32 = view.sum_all().unwrap().to_scalar().unwrap();
            assert_eq!(sum, 3.0 * count as f32);
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn released_memory_goes_back_to_the_system() {
        const BYTES: usize = 256 << 20;
        let tensor = Tensor::ones(BYTES / 4, candle_core::DType::F32, &Device::Cpu).unwrap();
        let before = resident();
        release(&tensor).unwrap();
        assert!(
            before.saturating_sub(resident()) > BYTES / 4 * 3,
            "{before} {}",
            resident()
        );
    }
}
