//! Parameters in memory that the engine's code cannot reach: on a GPU.
//!
//! What the model computes with lies on the device: whole parameters always, sharded ones while they are gathered. All else
//! stays in the host's memory, where the CPU works on it: gradient buckets, f32 masters, shards, the optimizer's state. That
//! is what DeepSpeed calls offloading with the host's optimizer.
//!
//! # What is copied
//!
//! Engine code says what it is about to do with which elements ([`Intent`]), and [`ManagedTensor`] copies what that needs:
//!
//! | intent | from the device before | to the device after |
//! | --- | --- | --- |
//! | `Read` | the elements | nothing |
//! | `Overwrite` | nothing | the elements |
//! | `Change` | the elements | the elements |
//!
//! On the CPU none of this happens: code works in the tensor's own memory. In a step, parameters with masters are
//! overwritten; f32 parameters that are whole are their own masters and are changed. A gradient is read once, in its own
//! dtype, beside what the backward computes meanwhile, and becomes f32 on its way into the bucket
//! ([`Gradients`](crate::gradients::Gradients) says when). A gather puts all ranks' chunks of a parameter together in the
//! host's memory and copies them once.
//!
//! # Why no memory is used too early or too late
//!
//! - **On the host** copies go through [`Staging`]: page-locked memory of which each piece carries an event that is
//!   recorded behind the last copy from or to it. Whoever looks at the piece, writes it or frees it waits for that event
//!   first. No copy ever gets memory of anybody else's, so nothing has to wait for a copy to the device.
//! - **On the device** every copy of a parameter goes into the stream that computes with it, which is one stream for all
//!   threads of a rank: a device whose stream is another one in each thread is refused. So a copy to a tensor comes after all
//!   that was started before it with the old values, and before all that is started later. Memory is allocated and freed in
//!   the order of that stream, too.
//! - **A gradient** is copied in a stream of its own, which waits for what had been started when the gradient came, on the
//!   device. Nothing writes the gradient after that, and it is kept until the copy is over.
//! - The tensor's lock is held from the first copy's start to the last one's, as it is while code works on the CPU.
//!
//! # What is released
//!
//! A released parameter's memory goes back to the device's pool, from which the next gather takes it. What is left in the
//! tensor is a byte of a type that no op of candle's computes with: an op that uses the parameter at the wrong time is an
//! error, it reads and writes nothing. (On the CPU it computes nonsense, see [`release`](crate::release).) Work that was
//! started with the old memory is before its end in the stream.
//!
//! # Emulation
//!
//! All but the copies themselves is independent of the device, and `EngineOptions::emulate_device` lets tests run it on
//! the CPU: parameters are then treated as if the engine could not reach them. Memory that is to be overwritten is filled
//! with what is no number first.

#[cfg(feature = "cuda")]
mod cuda;
mod flat_memory;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod launch;
mod managed_tensor;
mod memory;
#[cfg(not(feature = "cuda"))]
mod no_gpu;
mod staging;
mod step;

pub(crate) use flat_memory::FlatMemory;
#[cfg(feature = "cuda")]
pub(crate) use gpu::Gpu;
pub(crate) use managed_tensor::{Filling, Intent, ManagedTensor};
#[cfg(not(feature = "cuda"))]
pub(crate) use no_gpu::Gpu;
pub(crate) use staging::{Reading, Staging};
pub(crate) use step::{Conversion, DeviceStep, StepTarget};
