//! NCCL: ranks with a GPU each, on one host or many.
//!
//! # Protocol
//!
//! - **Meeting.** Rank 0 puts NCCL's id into the store; all ranks make the communicator with it, in a thread that owns it
//!   from then on (`owner`). No call blocks: each is followed by looks at NCCL's own state, the clock and the other ranks.
//! - **Calls.** Every collective begins with a comparison of calls through the store (`board`): ranks that differ get one
//!   error, all of them, and late ranks are named, before NCCL is entered. A message between two ranks begins likewise:
//!   here a `send` waits for its receiver. A barrier is such a comparison and no more.
//! - **Data** in unified memory of a GPU (`cuda::UnifiedMemory`) is moved in place: reductions, gathers of parts and
//!   broadcasts of such memory get the caller's addresses. Nothing on the device works with it when the call begins, since who
//!   gets at its bytes has waited for that, and nothing does when it ends: the call waits for NCCL, or aborts it.
//! - **Other data** is copied to the device, moved by NCCL's own operations (`plan`) in a stream of the group's own, and copied
//!   back; so are exchanges. NCCL never gets memory of the host's, so an operation that fails leaves nothing behind that points
//!   to it. Unequal parts are one NCCL group of broadcasts or reductions.
//! - **Sub-groups** are `ncclCommSplit`, each with a thread and a stream of its own. Operations of two groups with the same
//!   GPU may be under way at once; NCCL asks for room for both on the GPU.
//!
//! # Reductions
//!
//! They are NCCL's: in an order of its own, which depends on the sizes of data and group but not on the run, in the
//! elements' type, so that 16-bit sums are rounded at every step; `Mean` is `ncclAvg`; whether `Min` and `Max` keep a NaN is
//! NCCL's to say. All ranks get the same bits, but not those of the other backends.
//!
//! # Failure
//!
//! - A rank that fails writes why into the place of its next call and under a key of the group: others learn it when they
//!   wait for its call, or within a tenth of a second while NCCL moves their data. They abort the communicator.
//! - When the deadline passes, or NCCL reports an error of its own, the communicator is aborted before the call returns. If NCCL
//!   does not return from that either, the process is ended: nothing else can be sound while a kernel of it runs.
//! - A process that dies is noticed by the launcher; without one, by the deadline.
//!
//! # What is to come
//!
//! An operation in place still waits, on the host, for what computed the data, and for NCCL: in the thread that runs behind the
//! caller, so that the caller computes meanwhile, but with nothing of NCCL's queued ahead. Streams could wait for each other
//! instead, on the device: the group's for the buffer's event, and the buffer's next work for an event behind the plan. The
//! owner thread would then watch the oldest plan. Comparing calls through the store would have to become a mode for debugging:
//! it is slower than small buckets are.

mod board;
mod carrier;
mod communicator;
mod group;
mod library;
mod memory;
mod owner;
mod plan;
#[cfg(test)]
mod tests;

use crate::store::StoreClient;
use crate::{Communicator, Error, Options, Result, World, cuda};
use board::Board;
use carrier::NcclCarrier;
use communicator::communicator;
use group::{Group, LEAST_FOR_MAKING};
use std::sync::Arc;

/// Makes the group of all ranks of `world`, which meet through the store; also of one rank, to try NCCL with.
///
/// # Errors
/// [`Error::Unsupported`] when the options name no GPU, or the driver, a library or that GPU is missing;
/// [`Error::Nccl`] when NCCL refuses, for example two ranks with one GPU; ranks that do not come in time.
pub fn connect(world: &World, store: &StoreClient, options: &Options) -> Result<Arc<dyn Communicator>> {
    let Some(gpu) = options.gpu else {
        return Err(Error::Unsupported {
            what: "the nccl backend needs a GPU for each rank, and this rank computes on the CPU".into(),
            hint: "ask for GPUs with SCONCE_DEVICE=cuda, or take another backend with SCONCE_BACKEND".into(),
        });
    };
    let gpus = cuda::device_count()?;
    cuda::require_nccl()?;
    if gpu >= gpus {
        return Err(Error::Unsupported {
            what: format!("the nccl backend cannot use device cuda:{gpu}, since this process may use {gpus} GPU(s)"),
            hint: "start fewer ranks on this host, or see whether CUDA_VISIBLE_DEVICES hides some".into(),
        });
    }
    let (rank, size) = (world.rank, world.size);
    // Every rank counts its own connections, which all ranks make in one order.
    let number = store.add(&format!("sconce/nccl/{rank}/connections"), 1)?;
    let prefix = format!("sconce/nccl/{number}");
    let board = Board::new(store.again(), prefix, "world".into(), (rank, size), options.timeout);
    let id_key = format!("{}/id", board.prefix);
    let id = if rank == 0 {
        let id = library::unique_id()?;
        store.set(&id_key, &id)?;
        id
    } else {
        let id = store.wait(&id_key, options.timeout.max(LEAST_FOR_MAKING))?;
        id.try_into().map_err(|_| Error::Nccl {
            rank,
            call: "meeting",
            reason: "rank 0 gave no id of NCCL's; run the same program on all ranks".into(),
        })?
    };
    let group = Group::new(board, options.clone(), cuda::is_unified, move |watch| {
        Ok(Box::new(NcclCarrier::connect(id, (rank, size), gpu, watch)?))
    })?;
    Ok(communicator(group))
}

/// Returns NCCL's version, for example `2.28.9`; needs no GPU.
///
/// # Errors
/// [`Error::Unsupported`] when the library is missing; [`Error::Nccl`] when it does not answer.
pub fn version() -> Result<String> {
    cuda::require_nccl()?;
    let version = library::version()?;
    Ok(format!(
        "{}.{}.{}",
        version / 10_000,
        version / 100 % 100,
        version % 100
    ))
}
