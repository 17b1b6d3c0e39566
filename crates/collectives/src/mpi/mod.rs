//! MPI: ranks on many hosts, over the cluster's own library and fabric.
//!
//! # Protocol
//!
//! All traffic is non-blocking sends and receives, which alone can be waited for with a deadline. Messages of a group
//! have its own MPI communicator; what a message is, its tag says:
//!
//! | tag | from, to | meaning |
//! | --- | --- | --- |
//! | `CALL` | every rank to every other, first of all in a collective | number, signature, and the data if it is small |
//! | `DATA` | as the collective has it, once all calls were compared | the rest, in messages of 1 MiB at most |
//! | `MESSAGE` | sender to receiver | signature of a `send`, and the data if it is small |
//! | `READY` | receiver to sender | the signatures agree: send the data |
//! | `MESSAGE_DATA` | sender to receiver | the data of a `send` |
//! | `NOTICE` | a rank to all others, once | it has failed, and why; or it has left the group |
//!
//! A rank that has all calls of a collective knows that all ranks have entered it, and compares the signatures: ranks
//! that differ get one error, all of them, before any data moves (`group`). Reductions exchange parts and reduce them
//! here, in the ranks' order, by the same kernels as every other backend: they have the same bits (`reducing`).
//!
//! # Failure
//!
//! - A rank that fails tells all others. Who waits for the call of a rank that has told so gets the cause as its error;
//!   who has that rank's call goes on, since then the rank goes on too, and fails in its next operation. Thus all ranks
//!   enter a collective or none does, and the caller's memory is not lent to messages that nobody will take.
//! - A process that dies ends the job: `mpirun` notices, names the rank, and ends the others.
//! - A deadline passes in waiting for calls: an error that names the late ranks. It passes in the middle of data, which
//!   takes a peer that is stuck or a deadline that passed elsewhere at the same moment: what can be cancelled is
//!   cancelled. If MPI still holds the caller's memory then, nothing but the end of the job can be sound: `MPI_Abort`.
//! - `MPI_Comm_split` is MPI's own collective and has no deadline. It is called when all ranks have said that they come; a
//!   rank that stops between the two makes the others end the job when the deadline passes.
//! - At its end a process waits for the others' before it finalises MPI, without which `mpirun` counts it as failed; after
//!   a failure it waits five seconds at most.

mod communicator;
mod ending;
mod group;
mod library;
mod notices;
mod operations;
mod point_to_point;
mod reducing;
mod split;
mod waiting;

use crate::{Communicator, Error, Options, Result, World, single};
use group::Group;
use library::Library;
use std::sync::{Arc, OnceLock};

/// The group of all ranks of the job, out of which every connection gets a group of its own.
static ALL: OnceLock<Arc<Group>> = OnceLock::new();

/// Makes the group of all ranks of `world`, which `mpirun` (or `srun --mpi`) has started.
///
/// # Errors
/// [`Error::Unsupported`] when MPI cannot be used, or knows another world than the environment; [`Error::Timeout`]
/// naming ranks that do not come in time.
pub fn connect(world: &World, options: &Options) -> Result<Arc<dyn Communicator>> {
    if world.size == 1 {
        return Ok(single());
    }
    let library = Library::get()?;
    if (library.rank, library.size) != (world.rank, world.size) {
        return Err(Error::Unsupported {
            what: format!(
                "MPI says that this is rank {} of {}, the environment that it is rank {} of {}",
                library.rank, library.size, world.rank, world.size
            ),
            hint: "start all ranks with one `mpirun -n N PROGRAM` or `sconce launch --backend mpi`; ranks that are \
                   started one by one are worlds of one to MPI"
                .into(),
        });
    }
    let all = ALL.get_or_init(|| {
        ending::finalise_at_exit();
        let name = "the job".into();
        Arc::new(Group::new(
            name,
            library.rank,
            library.size,
            world.local_size,
            library,
            library.world,
            options.clone(),
        ))
    });
    all.connect(options)
}

/// Returns the name and version of the MPI library, without initialising it.
///
/// # Errors
/// [`Error::Unsupported`] when it does not tell them.
pub fn library_version() -> Result<String> {
    // Open MPI's holds commas and more; the rest of the first line is what identifies it.
    let version = library::version()?;
    Ok(version.lines().next().unwrap_or_default().trim().to_owned())
}
