//! Parameters and state on a GPU.
//!
//! What the model computes with lies on the device: whole parameters always, sharded ones while they are gathered. Where all
//! else lies the placement says ([`Tier`](crate::Tier)): gradient buckets, f32 masters, shards, the optimizer's state. None of
//! this has run on a GPU yet; it is tested over a stand-in for CUDA's driver.
//!
//! # State on the device
//!
//! By default it lies in *unified memory*, whose addresses are the same for host and GPU, and whose pages stay where they are
//! as long as only one of them asks for them. So all code of the engine's that works on slices is right for it: checkpoints,
//! a user's own rules, compression. What every step does is done by kernels instead ([`Gpu`], `kernels.cu`), in the stream
//! that computes, and the host looks at nothing but a norm and a flag:
//!
//! - a gradient is put into its places in the bucket, or added, from its own dtype;
//! - a bucket is handed to the communicator where it lies, narrowed before if it travels in 16 bits;
//! - this rank's part is added to its shard, and norms, limits and overflow are found in place;
//! - the rules of this crate update masters, moments and 16-bit copies in one pass
//!   ([`OptimizerRule::kernel`](crate::OptimizerRule::kernel));
//! - updated values and gathered shards are copied between such memory and tensors on the device.
//!
//! Kernels do what the CPU's loops do, operation by operation, so that all come to the same bits, norms included.
//! [`Engine::host_accesses`](crate::Engine::host_accesses) counts how often the host looked all the same: for a rule without a
//! kernel, a candle optimizer, compression, and gradients that are looked at for anomalies.
//!
//! Unified memory may be larger than the GPU's: what does not fit is moved back and forth, slowly, where other memory would be
//! refused. A GPU that host and device cannot reach at one time (`concurrentManagedAccess`) keeps state on the host.
//!
//! # State on the host
//!
//! With [`Tier::Host`](crate::Tier::Host) and [`Tier::Disk`](crate::Tier::Disk), state lies in the host's memory, where the CPU
//! works on it. That is what DeepSpeed calls offloading with the host's optimizer. Engine code says what it is about to do with
//! which elements of a tensor ([`Intent`]), and [`ManagedTensor`] copies what that needs:
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
//! - **Unified memory** is lent to the stream that works with it, and carries an event that is recorded behind all such work
//!   (`sconce_collectives::cuda::Lent`). Other streams wait for it on the device; the host waits for it
//!   before it looks, before it hands the memory to a communicator, and before it frees it.
//! - **On the host** copies go through [`Staging`]: page-locked memory of which each piece carries an event that is
//!   recorded behind the last copy from or to it. Whoever looks at the piece, writes it or frees it waits for that event
//!   first. No copy ever gets memory of anybody else's, so nothing has to wait for a copy to the device.
//! - **On the device** every kernel and copy on a parameter goes into the stream that computes with it, which is one stream for
//!   all threads of a rank: a device whose stream is another one in each thread is refused. So what changes a tensor comes after
//!   all that was started before it with the old values, and before all that is started later. Memory is allocated and freed in
//!   the order of that stream, too.
//! - **A gradient** that goes to the host is copied in a stream of its own, which waits for what had been started when the
//!   gradient came, on the device. Nothing writes the gradient after that, and it is kept until the copy is over.
//! - The tensor's lock is held while work on it is put into the stream, as it is while code works on the CPU.
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
//! What happens to parameters whose state is on the host is, but for the copies themselves, independent of the device, and
//! `EngineOptions::emulate_device` lets tests run it on the CPU: parameters are then treated as if the engine could not reach
//! them. Memory that is to be overwritten is filled with what is no number first.

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
pub(crate) use step::{Conversion, DeviceStep, NormPiece, Spread, StepTarget};
