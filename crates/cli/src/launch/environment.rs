//! The environment of a rank: torchrun's topology, Accelerate's settings, and the number of threads.
//!
//! Programs may read their place in the world from several families of variables. A launcher that was itself started
//! by MPI, torchrun or a batch system would hand down its own place, which contradicts the ranks'. Those are removed.

use std::ffi::{OsStr, OsString};
use std::process::Command;

use super::arguments::Arguments;
use super::main_process::MainProcess;

/// Starts of the names of variables that tell a place in the world that is not this launcher's doing.
const FOREIGN_TOPOLOGY: [&str; 9] = [
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_",
    "MV2_COMM_WORLD_",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "TORCHELASTIC_",
];

/// Numbers of threads, for rayon (and with it candle's matrix products) and for OpenMP.
const THREAD_COUNTS: [&str; 2] = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"];

/// What every rank's environment has in common, and how it differs from the launcher's.
#[derive(Debug)]
pub(super) struct Environment {
    set: Vec<(&'static str, String)>,
    remove: Vec<OsString>,
}

impl Environment {
    /// Derives the ranks' environment from the flags and from the launcher's own (`inherited`).
    ///
    /// `cores` is the number of cores that the launcher may use. `store` are the variables of the rendezvous store.
    pub(super) fn new(
        arguments: &Arguments,
        main_process: &MainProcess,
        store: Vec<(&'static str, String)>,
        inherited: impl IntoIterator<Item = (OsString, OsString)>,
        cores: usize,
    ) -> Self {
        let world_size = arguments.num_processes;
        let inherited = Vec::from_iter(inherited);
        let given = |name: &str| inherited.iter().any(|(of, value)| of == name && !value.is_empty());

        let mut set = vec![
            ("WORLD_SIZE", world_size.to_string()),
            ("LOCAL_WORLD_SIZE", world_size.to_string()),
            ("GROUP_RANK", "0".to_owned()),
            ("GROUP_WORLD_SIZE", "1".to_owned()),
            ("ROLE_NAME", "default".to_owned()),
            ("ROLE_WORLD_SIZE", world_size.to_string()),
            ("NODE_RANK", "0".to_owned()),
            ("MASTER_ADDR", main_process.address.clone()),
            ("MASTER_PORT", main_process.port.to_string()),
        ];
        set.extend(store);

        for name in THREAD_COUNTS {
            match arguments.num_cpu_threads_per_process {
                Some(threads) => set.push((name, threads.to_string())),
                None if given(name) => {}
                None => set.push((name, (cores / world_size).max(1).to_string())),
            }
        }

        if arguments.cpu {
            set.push(("ACCELERATE_USE_CPU", "True".to_owned()));
        }
        if arguments.debug {
            set.push(("ACCELERATE_DEBUG_MODE", "true".to_owned()));
        }
        set.extend(arguments.settings_variables(|name| {
            let found = inherited.iter().find(|(of, _)| of == name);
            found.map(|(_, value)| value.to_string_lossy().into_owned())
        }));

        let remove = inherited
            .into_iter()
            .map(|(name, _)| name)
            .filter(|name| is_foreign_topology(name))
            .collect();
        Self { set, remove }
    }

    /// Gives `command` the environment of rank `rank`.
    pub(super) fn apply(&self, rank: usize, command: &mut Command) {
        for name in &self.remove {
            command.env_remove(name);
        }
        command.envs(self.set.iter().map(|(name, value)| (name, value)));
        // With one host, a rank's numbers in the world, on its host and in its role are the same.
        for name in ["RANK", "LOCAL_RANK", "ROLE_RANK"] {
            command.env(name, rank.to_string());
        }
    }
}

fn is_foreign_topology(name: &OsStr) -> bool {
    FOREIGN_TOPOLOGY
        .iter()
        .any(|start| name.as_encoded_bytes().starts_with(start.as_bytes()))
}
