//! From "who am I" to a group of all ranks.

use crate::environment as variable;
use crate::store::{StoreClient, StoreServer, join};
use crate::{Backend, Communicator, Error, Options, Result, World, shm, single};
use std::sync::Arc;
use std::time::Duration;

/// Variables of which a rank that some launcher has started has at least one.
const OF_LAUNCHERS: [&str; 7] = [
    variable::RANK,
    variable::WORLD_SIZE,
    variable::OMPI_COMM_WORLD_SIZE,
    variable::PMI_SIZE,
    variable::PMIX_RANK,
    variable::SLURM_STEP_NUM_TASKS,
    variable::SLURM_STEP_ID,
];

/// A connection of this process to all ranks of the world.
#[derive(Debug)]
pub struct Connection {
    /// The group of all ranks.
    pub communicator: Arc<dyn Communicator>,
    /// The rendezvous store's client; `None` in a world of one and over MPI, which need no store.
    pub store: Option<StoreClient>,
    /// Where ranks compare their calls through the store, it must outlive what the others still read.
    _parting: Option<Parting>,
    /// The store itself, where this rank hosts it.
    _server: Option<StoreServer>,
}

/// Waits, when it is dropped, until all ranks are about to part from the store, or not for long.
#[derive(Debug)]
struct Parting {
    store: StoreClient,
    ranks: usize,
}

impl Parting {
    /// How long ranks wait for each other; what they have still to read takes a moment only.
    const MOST: Duration = Duration::from_secs(5);
}

impl Drop for Parting {
    fn drop(&mut self) {
        // Who comes late, or not at all, has failed or works on without the others.
        let _ = self.store.barrier("sconce/parting", self.ranks, Self::MOST);
    }
}

impl Connection {
    fn without_store(communicator: Arc<dyn Communicator>) -> Self {
        Self {
            communicator,
            store: None,
            _parting: None,
            _server: None,
        }
    }
}

/// Joins the ranks that the world describes, over the backend that the environment names; called by all ranks.
///
/// # Errors
/// As [`connect_over`], and when `SCONCE_BACKEND` names none.
pub fn connect(world: &World, options: &Options) -> Result<Connection> {
    connect_over(Backend::from_env()?, world, options)
}

/// Joins the ranks that the world describes, over one backend; called by all ranks with the same.
///
/// # Errors
/// When the store cannot be reached, ranks do not come in time, the backend does not serve this world, or this build does
/// not have it.
pub fn connect_over(backend: Backend, world: &World, options: &Options) -> Result<Connection> {
    if !backend.is_built() {
        return Err(Error::Unsupported {
            what: format!("the {} backend is not in this program", backend.name()),
            hint: format!("build it with `--features {}`", backend.name()),
        });
    }
    if world.size == 1 {
        if backend == Backend::Mpi {
            refuse_plain_start(variable::of_process)?;
        }
        return Ok(Connection::without_store(single()));
    }
    match backend {
        #[cfg(feature = "mpi")]
        Backend::Mpi => Ok(Connection::without_store(crate::mpi::connect(world, options)?)),
        _ => {
            let (server, client) = join(world, options.timeout)?;
            let communicator = match backend {
                #[cfg(feature = "nccl")]
                Backend::Nccl => crate::nccl::connect(world, &client, options)?,
                _ => shm::connect(world, &client, options)?,
            };
            let parting = (backend == Backend::Nccl).then(|| Parting {
                store: client.again(),
                ranks: world.size,
            });
            Ok(Connection {
                communicator,
                store: Some(client),
                _parting: parting,
                _server: server,
            })
        }
    }
}

/// Refuses MPI to a program that nobody started as a rank: several of them would be as many silent worlds of one.
fn refuse_plain_start(lookup: impl Fn(&str) -> Option<String>) -> Result<()> {
    if OF_LAUNCHERS.iter().any(|name| lookup(name).is_some()) {
        return Ok(());
    }
    Err(Error::Unsupported {
        what: "the mpi backend in a program that was started plainly, which is a world of one".into(),
        hint: "start it with `mpirun -n N PROGRAM` or `sconce launch --backend mpi`, or unset SCONCE_BACKEND".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpi_is_refused_to_a_program_that_no_launcher_started() {
        assert!(refuse_plain_start(|name| (name == "PMIX_RANK").then(|| "0".into())).is_ok());
        let message = refuse_plain_start(|_| None).unwrap_err().to_string();
        assert!(
            message.contains("world of one") && message.contains("mpirun -n N"),
            "{message}"
        );
    }

    #[test]
    #[cfg(not(feature = "nccl"))]
    fn a_build_without_nccl_says_how_to_get_it() {
        let error = connect_over(Backend::Nccl, &World::single(), &Options::default()).unwrap_err();
        assert!(error.to_string().contains("--features nccl"), "{error}");
    }

    #[test]
    #[cfg(not(feature = "mpi"))]
    fn a_build_without_mpi_says_how_to_get_it() {
        let error = connect_over(Backend::Mpi, &World::single(), &Options::default()).unwrap_err();
        assert!(error.to_string().contains("--features mpi"), "{error}");
    }
}
