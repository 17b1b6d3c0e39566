//! What carries the data of a run.

use crate::environment::{self as variable, Reader};
use crate::{Error, Result};

/// A way to move data between the ranks of a world.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// Shared memory: all ranks on one host.
    Shm,
    /// The cluster's MPI: ranks on any hosts, started by `mpirun` or `srun`; needs the feature `mpi`.
    Mpi,
    /// NCCL: ranks with a GPU each, on any hosts; needs the feature `nccl`.
    Nccl,
}

impl Backend {
    /// All backends that can be asked for.
    pub const ALL: [Self; 3] = [Self::Shm, Self::Mpi, Self::Nccl];

    /// Returns the name that users write, for example `mpi`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Mpi => "mpi",
            Self::Nccl => "nccl",
        }
    }

    /// Says whether this build has it.
    pub fn is_built(self) -> bool {
        match self {
            Self::Shm => true,
            Self::Mpi => cfg!(feature = "mpi"),
            Self::Nccl => cfg!(feature = "nccl"),
        }
    }

    /// Reads what this process's environment asks for; shared memory where it asks for nothing.
    ///
    /// # Errors
    /// [`Error::Environment`] when there is no backend of that name.
    pub fn from_env() -> Result<Self> {
        Self::from_lookup(variable::of_process)
    }

    /// Reads an environment given as a function from name to value, by the same rule.
    ///
    /// # Errors
    /// As [`Backend::from_env`].
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let Some(value) = Reader::new(&lookup).text(variable::SCONCE_BACKEND) else {
            return Ok(Self::Shm);
        };
        let named = Self::ALL.into_iter().find(|backend| backend.name() == value);
        named.ok_or_else(|| Error::Environment {
            variable: variable::SCONCE_BACKEND,
            value,
            reason: "no backend of that name; expected shm, mpi or nccl".to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_taken_unless_another_backend_is_named() {
        let read = |value: Option<&str>| Backend::from_lookup(|_| value.map(str::to_owned));
        assert_eq!(read(None).unwrap(), Backend::Shm);
        assert_eq!(read(Some(" ")).unwrap(), Backend::Shm);
        for backend in Backend::ALL {
            assert_eq!(read(Some(backend.name())).unwrap(), backend);
        }
        let message = read(Some("MPI")).unwrap_err().to_string();
        assert!(
            message.contains("SCONCE_BACKEND=\"MPI\"") && message.contains("shm, mpi or nccl"),
            "{message}"
        );
    }
}
