//! Every environment variable that this crate reads, with who sets it and what it means.
//!
//! One place for all names, so that a reader (and the generated reference page) sees the whole list. A variable that
//! is set to nothing but blanks counts as unset, so `RANK= program` takes `RANK` away from `program`.
//!
//! Which of the launchers' families wins is told at [`World`](crate::World).

// torchrun's family: torchrun itself, `sconce launch`, `accelerate launch`, DeepSpeed's launcher.

/// This process's number among all ranks, from 0. Set by torchrun and `sconce launch`.
pub const RANK: &str = "RANK";
/// How many ranks there are in all. Set by torchrun and `sconce launch`.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// This process's number on its own host, from 0. Set by torchrun and `sconce launch`.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// How many ranks this process's host has. Set by torchrun and `sconce launch`.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// The number of this host, from 0. Set by torchrun and `sconce launch`.
pub const GROUP_RANK: &str = "GROUP_RANK";
/// The number of this host, from 0, where [`GROUP_RANK`] is not set. Set by hand and by cluster operators.
pub const NODE_RANK: &str = "NODE_RANK";
/// Host name or address of rank 0. Set by torchrun, `sconce launch` and by hand; 127.0.0.1 where it is not set.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// Port on [`MASTER_ADDR`] for the rendezvous store, 1 to 65535. Set as `MASTER_ADDR` is; 29500 where it is not set.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// `True` when torchrun's own store listens on [`MASTER_PORT`]; Sconce's store then takes the port after it. Set by
/// torchrun.
pub const TORCHELASTIC_USE_AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";

// Open MPI.

/// This process's number among all ranks. Set by Open MPI's `mpirun`.
pub const OMPI_COMM_WORLD_RANK: &str = "OMPI_COMM_WORLD_RANK";
/// How many ranks there are in all. Set by Open MPI's `mpirun`.
pub const OMPI_COMM_WORLD_SIZE: &str = "OMPI_COMM_WORLD_SIZE";
/// This process's number on its own host. Set by Open MPI's `mpirun`.
pub const OMPI_COMM_WORLD_LOCAL_RANK: &str = "OMPI_COMM_WORLD_LOCAL_RANK";
/// How many ranks this process's host has. Set by Open MPI's `mpirun`.
pub const OMPI_COMM_WORLD_LOCAL_SIZE: &str = "OMPI_COMM_WORLD_LOCAL_SIZE";

// PMI: MPICH, Intel MPI, and `srun --mpi=pmi2`.

/// This process's number among all ranks. Set by MPICH's and Intel MPI's `mpiexec` and by `srun --mpi=pmi2`.
pub const PMI_RANK: &str = "PMI_RANK";
/// How many ranks there are in all. Set as [`PMI_RANK`] is.
pub const PMI_SIZE: &str = "PMI_SIZE";
/// This process's number on its own host. Set by MPICH's and Intel MPI's `mpiexec`.
pub const MPI_LOCALRANKID: &str = "MPI_LOCALRANKID";
/// How many ranks this process's host has. Set by MPICH's and Intel MPI's `mpiexec`.
pub const MPI_LOCALNRANKS: &str = "MPI_LOCALNRANKS";

/// This process's number in its PMIx job. Set by Open MPI's `mpirun` and by `srun --mpi=pmix`; only its presence counts.
pub const PMIX_RANK: &str = "PMIX_RANK";

// Slurm.

/// This process's number in its Slurm step. Set by `srun`; 0 in a batch script.
pub const SLURM_PROCID: &str = "SLURM_PROCID";
/// How many tasks the job asked for; the step's size where [`SLURM_STEP_NUM_TASKS`] is not set. Set by Slurm.
pub const SLURM_NTASKS: &str = "SLURM_NTASKS";
/// How many tasks the step has. Set by `srun`.
pub const SLURM_STEP_NUM_TASKS: &str = "SLURM_STEP_NUM_TASKS";
/// The step's number in its job. Set by `srun`, not in a batch script: that is how the two are told apart.
pub const SLURM_STEP_ID: &str = "SLURM_STEP_ID";
/// This process's number on its own host. Set by `srun`.
pub const SLURM_LOCALID: &str = "SLURM_LOCALID";
/// The number of this host in the step. Set by `srun`.
pub const SLURM_NODEID: &str = "SLURM_NODEID";
/// How many tasks each host of the step has, such as `4(x2),3`. Set by `srun`.
pub const SLURM_STEP_TASKS_PER_NODE: &str = "SLURM_STEP_TASKS_PER_NODE";
/// The same for the job, used where the step's is not set. Set by Slurm.
pub const SLURM_TASKS_PER_NODE: &str = "SLURM_TASKS_PER_NODE";
/// The hosts of the step, such as `node[003-005,7]`; the first of them has rank 0. Set by `srun`.
pub const SLURM_STEP_NODELIST: &str = "SLURM_STEP_NODELIST";
/// The hosts of the job, used where the step's are not set. Set by Slurm.
pub const SLURM_JOB_NODELIST: &str = "SLURM_JOB_NODELIST";

// Sconce's own.

/// What carries the data: `shm` (the default), `mpi` or `nccl`. Set by `sconce launch --backend` and by hand.
pub const SCONCE_BACKEND: &str = "SCONCE_BACKEND";
/// Address (`host:port`) of the rendezvous store that `sconce launch` hosts. Unset under other launchers: rank 0 then
/// hosts the store itself at `MASTER_ADDR:MASTER_PORT`.
pub const SCONCE_STORE_ADDR: &str = "SCONCE_STORE_ADDR";
/// The run's secret, which every client of the store must know. Set by `sconce launch`, and by hand where ranks on
/// several hosts are started by another launcher: any text of 16 characters or more.
pub const SCONCE_STORE_SECRET: &str = "SCONCE_STORE_SECRET";

/// All of them, in the order of this page.
pub const ALL: &[&str] = &[
    RANK,
    WORLD_SIZE,
    LOCAL_RANK,
    LOCAL_WORLD_SIZE,
    GROUP_RANK,
    NODE_RANK,
    MASTER_ADDR,
    MASTER_PORT,
    TORCHELASTIC_USE_AGENT_STORE,
    OMPI_COMM_WORLD_RANK,
    OMPI_COMM_WORLD_SIZE,
    OMPI_COMM_WORLD_LOCAL_RANK,
    OMPI_COMM_WORLD_LOCAL_SIZE,
    PMI_RANK,
    PMI_SIZE,
    MPI_LOCALRANKID,
    MPI_LOCALNRANKS,
    PMIX_RANK,
    SLURM_PROCID,
    SLURM_NTASKS,
    SLURM_STEP_NUM_TASKS,
    SLURM_STEP_ID,
    SLURM_LOCALID,
    SLURM_NODEID,
    SLURM_STEP_TASKS_PER_NODE,
    SLURM_TASKS_PER_NODE,
    SLURM_STEP_NODELIST,
    SLURM_JOB_NODELIST,
    SCONCE_BACKEND,
    SCONCE_STORE_ADDR,
    SCONCE_STORE_SECRET,
];

/// Looks a variable up in this process's environment; what is not Unicode is replaced, so that it fails to parse with
/// its name rather than passing as unset.
pub fn of_process(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// Reads variables through a lookup, so that tests need not change the process's environment.
pub(crate) struct Reader<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(lookup: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { lookup }
    }

    /// The variable's value without surrounding blanks; `None` if unset or blank.
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        let value = (self.lookup)(name)?;
        let value = value.trim();
        (!value.is_empty()).then(|| value.to_owned())
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn all_has_every_variable_of_this_page() {
        let constants = include_str!("environment.rs").lines();
        let name = |line: &'static str| {
            line.strip_prefix("pub const ")?
                .split_once(": &str = ")
                .map(|(name, _)| name)
        };
        assert_eq!(super::ALL, Vec::from_iter(constants.filter_map(name)));
    }
}
