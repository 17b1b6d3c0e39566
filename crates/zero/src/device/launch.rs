//! Kernels and copies as they are put into a stream: by address, with checked lengths.
//!
//! Who calls this sees to it that the memory is there until the work is over, and that nobody else has it
//! ([`gpu`](super::gpu)). [`Span`] checks that a range lies within its memory.

#![allow(unsafe_code, reason = "kernels and copies take addresses")]

use candle_core::CudaDevice;
use candle_core::cuda::WrapErr;
use candle_core::cuda::cudarc::driver::{CudaStream, DeviceRepr, LaunchConfig, PushKernelArg, result};
use sconce_collectives::cuda::Lent;
use std::ops::Range;

/// The kernels, for the driver to compile.
const KERNELS: &str = include_str!(concat!(env!("OUT_DIR"), "/kernels.ptx"));
/// Threads of a block, and blocks of a launch at most: more elements are taken in turns.
const THREADS: u64 = 256;
const MOST_BLOCKS: u64 = 8192;

/// Elements at an address.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) address: u64,
    pub(super) count: usize,
}

impl Span {
    /// Nothing, for what a kernel does not use.
    pub(super) const NONE: Self = Self { address: 0, count: 0 };

    /// Returns elements of `size` bytes of memory of `bytes` bytes.
    pub(super) fn of(address: u64, bytes: usize, elements: &Range<usize>, size: usize) -> candle_core::Result<Self> {
        if elements.start > elements.end || elements.end > bytes / size {
            candle_core::bail!("elements {elements:?} of {size} bytes are outside of memory of {bytes} bytes");
        }
        Ok(Self {
            address: address + (elements.start * size) as u64,
            count: elements.len(),
        })
    }

    pub(super) fn of_buffer(lent: &Lent<'_>, bytes: usize, elements: &Range<usize>) -> candle_core::Result<Self> {
        Self::of(lent.pointer(), bytes, elements, size_of::<f32>())
    }
}

/// What a kernel is called with.
#[derive(Debug, Clone, Copy)]
pub(super) enum Argument {
    Elements(Span),
    Count(u64),
    Word(u32),
    Number(f32),
    Factors(Factors),
}

/// A rule's factors, of which a kernel takes as many as it knows.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub(super) struct Factors(pub(super) [f32; crate::StepKernel::FACTORS]);

// SAFETY: an array of floats, as the kernels' structures of floats are.
unsafe impl DeviceRepr for Factors {}

/// Puts a kernel into the stream that computes.
///
/// # Safety
/// The arguments are those of the kernel of that name, and what it does with them is as the module's page has it.
pub(super) unsafe fn launch(
    device: &CudaDevice,
    kernel: &str,
    work: usize,
    arguments: &[Argument],
) -> candle_core::Result<()> {
    if work == 0 {
        return Ok(());
    }
    let function = device.get_or_load_custom_func(kernel, "sconce-zero", KERNELS)?;
    let mut builder = function.builder();
    for argument in arguments {
        match argument {
            Argument::Elements(span) => builder.arg(&span.address),
            Argument::Count(count) => builder.arg(count),
            Argument::Word(word) => builder.arg(word),
            Argument::Number(number) => builder.arg(number),
            Argument::Factors(factors) => builder.arg(factors),
        };
    }
    let blocks = (work as u64).div_ceil(THREADS).min(MOST_BLOCKS);
    let shape = LaunchConfig {
        grid_dim: (blocks as u32, 1, 1),
        block_dim: (THREADS as u32, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the caller's promise.
    unsafe { builder.launch(shape) }.w()?;
    Ok(())
}

/// Copies the bytes of a span to another of as many.
///
/// # Safety
/// The memory is there for the stream as the module's page has it, and its context is that of the calling thread.
pub(super) unsafe fn copy(from: Span, to: Span, stream: &CudaStream) -> candle_core::Result<()> {
    let bytes = equal([from, to])? as usize;
    if bytes > 0 {
        // SAFETY: both spans have so many bytes; the rest is the caller's promise.
        unsafe { result::memcpy_dtod_async(to.address, from.address, bytes, stream.cu_stream()) }.w()?;
    }
    Ok(())
}

/// Returns the number of elements of spans that must be equally long.
pub(super) fn equal([a, b]: [Span; 2]) -> candle_core::Result<u64> {
    if a.count != b.count {
        candle_core::bail!("{} elements where {} were expected", b.count, a.count);
    }
    Ok(a.count as u64)
}
