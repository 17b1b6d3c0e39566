//! Work on state that lies in unified memory of a GPU: kernels and copies, put into the stream that computes.
//!
//! # Safety
//!
//! What is put into a stream works with addresses. Each is that of memory which is there until the work is over:
//!
//! - of a [`Buffer`], which is lent to the stream while the work is put there
//!   ([`Lent`](sconce_collectives::cuda::Lent)): the buffer is freed, looked at by the host or worked on in other streams
//!   only behind it;
//! - of a tensor, whose memory is freed in the order of this same stream, and whose lock is held meanwhile, so that nobody
//!   puts work into the stream that expects the tensor otherwise.
//!
//! [`Span`](super::launch::Span) checks that a range lies within its memory. A kernel gets the number of elements of its
//! spans, which are checked to be equally long.

#![allow(unsafe_code, reason = "kernels work with addresses")]

use super::launch::{Argument, Factors, Span, copy, equal, launch};
use super::memory::{DeviceMemory, not_managed};
use super::{Conversion, DeviceStep, NormPiece, Spread, StepTarget};
use crate::layout::{BucketLayout, Slot};
use crate::{Norm, Result};
use candle_core::cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop, result};
use candle_core::cuda::{CudaStorageSlice as Slice, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Storage, Tensor};
use sconce_collectives::Buffer;
use sconce_collectives::cuda::UnifiedMemory;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The GPU on which an engine's state lies.
#[derive(Debug)]
pub(crate) struct Gpu {
    device: CudaDevice,
    memory: Arc<UnifiedMemory>,
    passing: Mutex<Passing>,
}

/// Memory through which values pass: never more of it than was in use at one time.
#[derive(Debug, Default)]
struct Passing {
    free: Vec<Buffer>,
    /// Of all there is, free or not.
    bytes: usize,
}

impl Gpu {
    /// Opens a device for state; `None` where it has no memory that host and device reach at one time.
    pub(super) fn open(device: &CudaDevice) -> candle_core::Result<Option<Self>> {
        let memory = UnifiedMemory::of(&device.cuda_stream()).map_err(candle_core::Error::wrap)?;
        if memory.is_none() {
            tracing::warn!(
                "this GPU has no memory that host and device can reach at one time: gradients, f32 masters and optimizer \
                 state lie in the host's memory, where the CPU steps them"
            );
        }
        Ok(memory.map(|memory| Self {
            device: device.clone(),
            memory,
            passing: Mutex::default(),
        }))
    }

    /// Allocates zeroed memory.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Buffer> {
        Ok(self.memory.allocate(bytes)?)
    }

    /// Returns memory of at least so many bytes, which may hold anything: the smallest that was given back and is large
    /// enough. Where all of that is too small, the largest makes room.
    pub(crate) fn take(&self, bytes: usize) -> Result<Buffer> {
        let mut passing = self.passing();
        let numbered = || {
            passing
                .free
                .iter()
                .enumerate()
                .map(|(number, free)| (free.len(), number))
        };
        let found = numbered().filter(|(size, _)| *size >= bytes).min();
        if let Some((_, number)) = found {
            return Ok(passing.free.swap_remove(number));
        }
        if let Some((size, number)) = numbered().max() {
            drop(passing.free.swap_remove(number));
            passing.bytes -= size;
        }
        let buffer = self.allocate(bytes)?;
        passing.bytes += buffer.len();
        Ok(buffer)
    }

    /// Takes it back; work under way may still have it.
    pub(crate) fn give_back(&self, buffer: Buffer) {
        self.passing().free.push(buffer);
    }

    /// Returns the bytes of such memory.
    pub(crate) fn passing_bytes(&self) -> usize {
        self.passing().bytes
    }

    fn passing(&self) -> MutexGuard<'_, Passing> {
        self.passing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how often the host has looked at what was allocated.
    pub(crate) fn host_accesses(&self) -> u64 {
        self.memory.host_accesses()
    }

    /// Says whether kernels here may work with a tensor.
    pub(crate) fn reaches(&self, tensor: &Tensor) -> bool {
        matches!(tensor.device(), Device::Cuda(device) if device.id() == self.device.id())
    }

    /// Puts a gradient, contiguous and of a managed dtype, into its places in a bucket, or adds it to what is there.
    pub(crate) fn place(
        &self,
        gradient: &Tensor,
        (layout, slot): (&BucketLayout, &Slot),
        bucket: &mut Buffer,
        is_first: bool,
    ) -> Result<()> {
        let (storage, contiguous) = gradient.storage_and_layout();
        let (Storage::Cuda(storage), Some((start, end))) = (&*storage, contiguous.contiguous_offsets()) else {
            return Err(not_managed().into());
        };
        let kernel = match gradient.dtype() {
            DType::F32 => "place_f32",
            DType::BF16 => "place_bf16",
            _ => "place_f16",
        };
        let stream = self.device.cuda_stream();
        let bytes = bucket.len();
        let lent = bucket.lend_mut(&stream)?;
        let (address, bytes_of_gradient, size, _reading) = address_of(storage, &stream)?;
        let from = Span::of(address, bytes_of_gradient, &(start..end), size)?;
        let (spread, first) = (Spread::of(layout, slot), layout.place(slot, 0).start);
        let to = Span::of_buffer(&lent, bytes, &(first..first + spread.extent(from.count)))?;
        if from.count != slot.elements {
            let message = format!("a gradient of {} elements for {}", from.count, slot.elements);
            return Err(candle_core::Error::msg(message).into());
        }
        let arguments = [
            Argument::Elements(from),
            Argument::Elements(to),
            Argument::Count(from.count as u64),
            Argument::Count(spread.chunk as u64),
            Argument::Count(spread.stride as u64),
            Argument::Word(is_first.into()),
        ];
        // SAFETY: `place_*` reads so many elements and writes as many, which lie within their extent (module page).
        Ok(unsafe { launch(&self.device, kernel, from.count, &arguments) }?)
    }

    /// Adds elements of a buffer, from one of them on, to the first of another, or copies them if they are the first.
    pub(crate) fn add(&self, from: (&Buffer, usize), to: &mut Buffer, count: usize, is_first: bool) -> Result<()> {
        let stream = self.device.cuda_stream();
        let (bytes, bytes_of_sums) = (from.0.len(), to.len());
        let (lent, lent_sums) = (from.0.lend(&stream)?, to.lend_mut(&stream)?);
        let from = Span::of_buffer(&lent, bytes, &(from.1..from.1 + count))?;
        let to = Span::of_buffer(&lent_sums, bytes_of_sums, &(0..count))?;
        let arguments = [
            Argument::Elements(from),
            Argument::Elements(to),
            Argument::Count(equal([from, to])?),
            // All in one place.
            Argument::Count(count as u64),
            Argument::Count(0),
            Argument::Word(is_first.into()),
        ];
        // SAFETY: `place_f32` reads so many elements and writes as many (module page).
        Ok(unsafe { launch(&self.device, "place_f32", count, &arguments) }?)
    }

    /// Rounds elements of a buffer to a 16-bit dtype, to the first of another, or widens those into the former.
    pub(crate) fn convert(
        &self,
        dtype: DType,
        (wide, elements): (&mut Buffer, &Range<usize>),
        narrow: &mut Buffer,
        way: Conversion,
    ) -> Result<()> {
        let stream = self.device.cuda_stream();
        let (bytes, bytes_of_narrow) = (wide.len(), narrow.len());
        let (lent, lent_narrow) = (wide.lend_mut(&stream)?, narrow.lend_mut(&stream)?);
        let (wide, count) = (Span::of_buffer(&lent, bytes, elements)?, elements.len());
        let narrow = Span::of(lent_narrow.pointer(), bytes_of_narrow, &(0..count), size_of::<u16>())?;
        let is_bf16 = dtype == DType::BF16;
        let (kernel, from, to) = match way {
            Conversion::Narrow => (if is_bf16 { "narrow_bf16" } else { "narrow_f16" }, wide, narrow),
            Conversion::Widen => (if is_bf16 { "widen_from_bf16" } else { "widen_from_f16" }, narrow, wide),
        };
        let arguments = [
            Argument::Elements(from),
            Argument::Elements(to),
            Argument::Count(equal([from, to])?),
        ];
        // SAFETY: the kernels read so many elements and write as many (module page).
        Ok(unsafe { launch(&self.device, kernel, count, &arguments) }?)
    }

    /// Makes elements zeros.
    pub(crate) fn zero(&self, buffer: &mut Buffer, elements: Range<usize>) -> Result<()> {
        let stream = self.device.cuda_stream();
        let bytes = buffer.len();
        let lent = buffer.lend_mut(&stream)?;
        let Span { address, count } = Span::of_buffer(&lent, bytes, &elements)?;
        if count > 0 {
            // SAFETY: the span lies in memory that is lent to the stream (module page); lending binds the context.
            let set = unsafe { result::memset_d8_async(address, 0, count * size_of::<f32>(), stream.cu_stream()) };
            set.w()?;
        }
        Ok(())
    }

    /// Multiplies elements.
    pub(crate) fn scale(&self, buffer: &mut Buffer, elements: Range<usize>, factor: f32) -> Result<()> {
        let bytes = buffer.len();
        let lent = buffer.lend_mut(&self.device.cuda_stream())?;
        let span = Span::of_buffer(&lent, bytes, &elements)?;
        let arguments = [
            Argument::Elements(span),
            Argument::Count(span.count as u64),
            Argument::Number(factor),
        ];
        // SAFETY: `scale` changes so many elements (module page).
        Ok(unsafe { launch(&self.device, "scale", span.count, &arguments) }?)
    }

    /// Limits the magnitude of elements; says whether all were finite before.
    pub(crate) fn clamp(&self, pieces: Vec<(&mut Buffer, Vec<Range<usize>>)>, limit: f32) -> Result<bool> {
        let stream = self.device.cuda_stream();
        let flag = self.flag()?;
        for (buffer, ranges) in pieces {
            let bytes = buffer.len();
            let lent = buffer.lend_mut(&stream)?;
            for range in ranges {
                let span = Span::of_buffer(&lent, bytes, &range)?;
                let arguments = [
                    Argument::Elements(span),
                    Argument::Count(span.count as u64),
                    Argument::Number(limit),
                    Argument::Elements(flag.1),
                ];
                // SAFETY: `clamp` changes so many elements, and sets the flag (module page).
                unsafe { launch(&self.device, "clamp", span.count, &arguments) }?;
            }
        }
        self.is_unset(&flag.0)
    }

    /// Says whether all elements are finite.
    pub(crate) fn are_finite(&self, pieces: &[(&Buffer, Range<usize>)]) -> Result<bool> {
        let stream = self.device.cuda_stream();
        let flag = self.flag()?;
        for (buffer, range) in pieces {
            let lent = buffer.lend(&stream)?;
            let span = Span::of_buffer(&lent, buffer.len(), range)?;
            let arguments = [
                Argument::Elements(span),
                Argument::Count(span.count as u64),
                Argument::Elements(flag.1),
            ];
            // SAFETY: `find_overflow` reads so many elements, and sets the flag (module page).
            unsafe { launch(&self.device, "find_overflow", span.count, &arguments) }?;
        }
        self.is_unset(&flag.0)
    }

    /// Returns what each chunk of each piece contributes to a norm.
    pub(crate) fn norms(&self, norm: Norm, pieces: &[NormPiece<'_>]) -> Result<Vec<f64>> {
        let stream = self.device.cuda_stream();
        let all: usize = pieces
            .iter()
            .map(|piece| piece.chunks * norm.sums(piece.spread.chunk))
            .sum();
        if all == 0 {
            return Ok(vec![0.0; pieces.iter().map(|piece| piece.chunks).sum()]);
        }
        // SAFETY: every bit pattern is a number, and all of them are written before they are read.
        let sums = unsafe { stream.alloc::<f64>(all) }.w()?;
        let (address, bytes) = (sums.device_ptr(&stream).0, all * size_of::<f64>());
        let mut start = 0;
        for piece in pieces {
            let lent = piece.memory.lend(&stream)?;
            let extent = piece.spread.extent(piece.count);
            let span = Span::of_buffer(&lent, piece.memory.len(), &(piece.start..piece.start + extent))?;
            let own = start..start + piece.chunks * norm.sums(piece.spread.chunk);
            start = own.end;
            let to = Span::of(address, bytes, &own, size_of::<f64>())?;
            let arguments = [
                Argument::Elements(span),
                Argument::Count(piece.count as u64),
                Argument::Count(piece.spread.chunk as u64),
                Argument::Count(piece.spread.stride as u64),
                Argument::Count(piece.chunks as u64),
                Argument::Word(norm.number()),
                Argument::Elements(to),
            ];
            // SAFETY: `norm_sums` reads so many elements, which lie within the extent, and writes as many sums of each chunk
            // as `Norm::sums` says.
            unsafe { launch(&self.device, "norm_sums", to.count, &arguments) }?;
        }
        let sums = stream.clone_dtoh(&sums).w()?;
        let mut rest = &sums[..];
        let mut joined = Vec::new();
        for piece in pieces {
            for _ in 0..piece.chunks {
                let (own, others) = rest.split_at(norm.sums(piece.spread.chunk));
                rest = others;
                joined.push(norm.of_sums(own));
            }
        }
        Ok(joined)
    }

    /// Copies the first bytes of a buffer into another, from one of its bytes on.
    pub(crate) fn copy(&self, from: &Buffer, to: (&mut Buffer, usize), bytes: usize) -> Result<()> {
        let stream = self.device.cuda_stream();
        let (all, all_of_target) = (from.len(), to.0.len());
        let (lent, lent_target) = (from.lend(&stream)?, to.0.lend_mut(&stream)?);
        let from = Span::of(lent.pointer(), all, &(0..bytes), 1)?;
        let to = Span::of(lent_target.pointer(), all_of_target, &(to.1..to.1 + bytes), 1)?;
        // SAFETY: both buffers are lent to the stream, which has bound the context (module page).
        Ok(unsafe { copy(from, to, &stream) }?)
    }

    /// Updates values by a rule's kernel.
    pub(crate) fn step(&self, step: DeviceStep<'_>, target: StepTarget<'_>) -> Result<()> {
        let stream = self.device.cuda_stream();
        match target {
            StepTarget::Tensor(tensor, elements) => Ok(tensor.on_memory(|memory| {
                let storage = whole(memory, DType::F32, tensor)?;
                let (address, bytes, size, _writing) = address_to_write(storage, &stream)?;
                let values = Span::of(address, bytes, &elements, size)?;
                self.launch_step(step, values, Span::NONE, 0)
            })?),
            StepTarget::Beside {
                masters: (masters, within),
                tensor,
                elements,
            } => Ok(tensor.on_memory(|memory| {
                let storage = whole(memory, tensor.dtype(), tensor)?;
                let (address, bytes, size, _writing) = address_to_write(storage, &stream)?;
                let copies = Span::of(address, bytes, &elements, size)?;
                let bytes = masters.len();
                let lent = masters.lend_mut(&stream).map_err(candle_core::Error::wrap)?;
                let values = Span::of_buffer(&lent, bytes, &within)?;
                self.launch_step(step, values, copies, form(tensor.dtype()))
            })?),
            StepTarget::Shard {
                values,
                masters,
                dtype,
                within,
            } => {
                let bytes = values.len();
                let lent = values.lend_mut(&stream)?;
                let own = Span::of(lent.pointer(), bytes, &within, dtype.size_in_bytes())?;
                let Some(masters) = masters else {
                    return Ok(self.launch_step(step, own, Span::NONE, form(dtype))?);
                };
                let bytes = masters.len();
                let lent = masters.lend_mut(&stream)?;
                let masters = Span::of_buffer(&lent, bytes, &within)?;
                Ok(self.launch_step(step, masters, own, form(dtype))?)
            }
        }
    }

    /// `values` are f32; `copies` are there if and only if their form is not 0.
    fn launch_step(&self, step: DeviceStep<'_>, values: Span, copies: Span, form: u32) -> candle_core::Result<()> {
        let stream = self.device.cuda_stream();
        let DeviceStep {
            kernel,
            gradient: (gradient, from),
            state: (state, place),
            spread,
        } = step;
        let count = values.count;
        if count == 0 {
            return Ok(());
        }
        let extent = spread.extent(count);
        let lent_gradient = gradient.lend(&stream).map_err(candle_core::Error::wrap)?;
        let gradient = Span::of_buffer(&lent_gradient, gradient.len(), &(from..from + extent))?;
        let mut lent_state = [None, None, None];
        let mut arrays = [Span::NONE; 3];
        let numbered = state.iter_mut().enumerate();
        for (number, array) in numbered.filter_map(|(number, array)| Some((number, array.on_device_mut()?))) {
            let bytes = array.len();
            let lent = array.lend_mut(&stream).map_err(candle_core::Error::wrap)?;
            arrays[number] = Span::of_buffer(&lent, bytes, &(place..place + extent))?;
            lent_state[number] = Some(lent);
        }
        let has_all = arrays.iter().take(kernel.arrays).all(|array| array.count == extent);
        if !has_all || (form != 0) != (copies.address != 0) || (form != 0 && copies.count != count) {
            let name = kernel.name;
            candle_core::bail!("{name} of {count} elements without some state, or with copies of another number");
        }
        let arguments = [
            Argument::Elements(values),
            Argument::Elements(copies),
            Argument::Word(form),
            Argument::Elements(gradient),
            Argument::Elements(arrays[0]),
            Argument::Elements(arrays[1]),
            Argument::Elements(arrays[2]),
            Argument::Count(count as u64),
            Argument::Count(spread.chunk as u64),
            Argument::Count(spread.stride as u64),
            Argument::Factors(Factors(kernel.factors)),
        ];
        // SAFETY: `step_*` reads and writes so many elements of each that it uses: values, and copies where there is a form,
        // which have been checked to be as many; gradient and the arrays that the kernel says it has, within their extent,
        // which they have been checked to have (module page).
        unsafe { launch(&self.device, kernel.name, count, &arguments) }
    }

    /// Makes a flag that is not set; its memory is freed in the order of the stream.
    fn flag(&self) -> candle_core::Result<(CudaSlice<u32>, Span)> {
        let stream = self.device.cuda_stream();
        let flag = stream.alloc_zeros::<u32>(1).w()?;
        let address = flag.device_ptr(&stream).0;
        Ok((flag, Span { address, count: 1 }))
    }

    fn is_unset(&self, flag: &CudaSlice<u32>) -> Result<bool> {
        let flag = self.device.cuda_stream().clone_dtoh(flag).w()?;
        Ok(flag == [0])
    }
}

/// Copies elements of a tensor to a buffer, from one of its bytes on.
pub(super) fn copy_to_buffer(
    storage: &CudaStorage,
    elements: Range<usize>,
    buffer: &mut Buffer,
    at: usize,
) -> candle_core::Result<()> {
    let stream = storage.device.cuda_stream();
    let (address, bytes, size, _reading) = address_of(storage, &stream)?;
    let from = Span::of(address, bytes, &(elements.start * size..elements.end * size), 1)?;
    let bytes = buffer.len();
    let lent = buffer.lend_mut(&stream).map_err(candle_core::Error::wrap)?;
    let to = Span::of(lent.pointer(), bytes, &(at..at + from.count), 1)?;
    // SAFETY: the buffer is lent to the stream, which has bound the context; the tensor's lock is held (module page).
    unsafe { copy(from, to, &stream) }
}

/// Copies elements of a tensor from a buffer, from one of its bytes on.
pub(super) fn copy_from_buffer(
    storage: &mut CudaStorage,
    elements: Range<usize>,
    buffer: &Buffer,
    at: usize,
) -> candle_core::Result<()> {
    let stream = storage.device.cuda_stream();
    let (address, bytes, size, _writing) = address_to_write(storage, &stream)?;
    let to = Span::of(address, bytes, &(elements.start * size..elements.end * size), 1)?;
    let lent = buffer.lend(&stream).map_err(candle_core::Error::wrap)?;
    let from = Span::of(lent.pointer(), buffer.len(), &(at..at + to.count), 1)?;
    // SAFETY: the buffer is lent to the stream, which has bound the context; the tensor's lock is held (module page).
    unsafe { copy(from, to, &stream) }
}

/// Returns how kernels write a tensor's 16-bit elements; 0 for f32.
fn form(dtype: DType) -> u32 {
    match dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        _ => 0,
    }
}

/// Returns the memory of a tensor on the GPU that has all its elements.
fn whole<'m>(
    memory: &'m mut dyn DeviceMemory,
    dtype: DType,
    tensor: &Tensor,
) -> candle_core::Result<&'m mut CudaStorage> {
    if !memory.holds(dtype, tensor.elem_count()) {
        return Err(not_managed());
    }
    memory.as_cuda().ok_or_else(not_managed)
}

/// Returns where a tensor's elements begin, the bytes of all and of one, and what tells the tensor of their use.
fn address_of<'s>(
    storage: &'s CudaStorage,
    stream: &'s CudaStream,
) -> candle_core::Result<(u64, usize, usize, SyncOnDrop<'s>)> {
    fn of<'s, T>(slice: &'s CudaSlice<T>, stream: &'s CudaStream) -> (u64, usize, usize, SyncOnDrop<'s>) {
        let (address, used) = slice.device_ptr(stream);
        (address, slice.num_bytes(), size_of::<T>(), used)
    }
    match &storage.slice {
        Slice::F32(slice) => Ok(of(slice, stream)),
        Slice::BF16(slice) => Ok(of(slice, stream)),
        Slice::F16(slice) => Ok(of(slice, stream)),
        _ => Err(not_managed()),
    }
}

/// Does so for elements that are written.
fn address_to_write<'s>(
    storage: &'s mut CudaStorage,
    stream: &'s CudaStream,
) -> candle_core::Result<(u64, usize, usize, SyncOnDrop<'s>)> {
    fn of<'s, T>(slice: &'s mut CudaSlice<T>, stream: &'s CudaStream) -> (u64, usize, usize, SyncOnDrop<'s>) {
        let bytes = slice.num_bytes();
        let (address, used) = slice.device_ptr_mut(stream);
        (address, bytes, size_of::<T>(), used)
    }
    match &mut storage.slice {
        Slice::F32(slice) => Ok(of(slice, stream)),
        Slice::BF16(slice) => Ok(of(slice, stream)),
        Slice::F16(slice) => Ok(of(slice, stream)),
        _ => Err(not_managed()),
    }
}
