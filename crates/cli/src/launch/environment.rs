//! The environment of a rank: torchrun's topology, Accelerate's settings, and the number of threads.
//!
//! Programs may read their place in the world from several families of variables. A launcher that was itself started
//! by MPI, torchrun or a batch system would hand down its own place, which contradicts the ranks'. Those are removed.

use std::ffi::{OsStr, OsString};
use std::process::Command;

use super::arguments::Arguments;
use super::gpu_ids::{CUDA_VISIBLE_DEVICES, GpuIds};
use super::place::Place;
use sconce_collectives::Backend;
use sconce_collectives::environment::{self as variable, SCONCE_BACKEND};
use sconce_core::environment::{ACCELERATE_CPU_AFFINITY, ACCELERATE_MIXED_PRECISION, KEPT_MEMORY};

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

/// A rank's place as this launcher and torchrun write it, and the store of a launcher further up.
const PLACES: [&str; 10] = [
    variable::RANK,
    variable::WORLD_SIZE,
    variable::LOCAL_RANK,
    variable::LOCAL_WORLD_SIZE,
    variable::GROUP_RANK,
    variable::NODE_RANK,
    variable::MASTER_ADDR,
    variable::MASTER_PORT,
    variable::SCONCE_STORE_ADDR,
    variable::SCONCE_STORE_SECRET,
];

/// Starts of the names of variables that programs read.
const OF_PROGRAMS: [&str; 7] = [
    "SCONCE_",
    "ACCELERATE_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
    "RAYON_",
    "OMP_",
    "RUST_",
];

/// Numbers of threads, for rayon (and with it candle's matrix products) and for OpenMP.
const THREAD_COUNTS: [&str; 2] = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"];

/// What Accelerate's launcher always tells its ranks of the compiler, but with DeepSpeed; programs in Python read it.
const NOT_COMPILED: [(&str, &str); 5] = [
    ("ACCELERATE_DYNAMO_BACKEND", "NO"),
    ("ACCELERATE_DYNAMO_MODE", "default"),
    ("ACCELERATE_DYNAMO_USE_FULLGRAPH", "False"),
    ("ACCELERATE_DYNAMO_USE_DYNAMIC", "False"),
    ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "False"),
];

/// By which Accelerate's library finds what a file and a DeepSpeed configuration both say.
const DEEPSPEED_FIELDS: &str = "ACCELERATE_CONFIG_DS_FIELDS";

/// What every rank's environment has in common, and how it differs from the launcher's.
#[derive(Debug)]
pub(super) struct Environment {
    set: Vec<(&'static str, String)>,
    remove: Vec<OsString>,
}

impl Environment {
    /// Derives the ranks' environment from the flags, their place, and the launcher's own environment (`inherited`).
    ///
    /// `cores` is the number of cores of one rank.
    pub(super) fn new(
        arguments: &Arguments,
        place: &Place,
        inherited: impl IntoIterator<Item = (OsString, OsString)>,
        cores: usize,
    ) -> Self {
        let inherited = Vec::from_iter(inherited);
        let mut set = place.variables(arguments.role(), arguments.max_restarts());
        let of_nccl = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
        if !inherited.iter().any(|(name, _)| name == of_nccl) {
            set.push((of_nccl, "1".to_owned()));
        }
        set.extend(common(arguments, &inherited, cores));

        let remove = inherited
            .into_iter()
            .map(|(name, _)| name)
            .filter(|name| is_foreign_topology(name) || is_of_other_store(name, place))
            .collect();
        Self { set, remove }
    }

    /// Gives `command` the environment of the rank that `place` has at `local_rank`.
    pub(super) fn apply(&self, place: &Place, local_rank: usize, command: &mut Command) {
        for name in &self.remove {
            command.env_remove(name);
        }
        command.envs(self.set.iter().map(|(name, value)| (name, value)));
        command.envs(place.variables_of(local_rank));
    }
}

/// The environment of a job that `mpirun` starts: everything but the ranks' places, which `mpirun` sets.
#[derive(Debug)]
pub(super) struct JobEnvironment {
    set: Vec<(&'static str, String)>,
    /// Inherited variables that ranks on other hosts must get too.
    kept: Vec<String>,
    remove: Vec<OsString>,
}

impl JobEnvironment {
    /// Derives it from the flags and the launcher's own environment; `cores` are those of one rank.
    pub(super) fn new(
        arguments: &Arguments,
        inherited: impl IntoIterator<Item = (OsString, OsString)>,
        cores: usize,
    ) -> Self {
        let inherited = Vec::from_iter(inherited);
        let mut set = common(arguments, &inherited, cores);
        set.retain(|(name, _)| *name != SCONCE_BACKEND);
        set.push((SCONCE_BACKEND, Backend::Mpi.name().to_owned()));
        let names = inherited.into_iter().map(|(name, _)| name);
        let is_place = |name: &OsString| PLACES.iter().any(|place| name == place);
        let (remove, others): (Vec<_>, Vec<_>) = names.partition(|name| is_foreign_topology(name) || is_place(name));
        let mut kept = Vec::from_iter(others.into_iter().filter_map(|name| name.into_string().ok()));
        let is_set = |name: &str| set.iter().any(|(of, _)| *of == name);
        kept.retain(|name| OF_PROGRAMS.iter().any(|start| name.starts_with(start)) && !is_set(name));
        kept.sort_unstable();
        Self { set, kept, remove }
    }

    /// The names of the variables that all ranks must get.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let kept = self.kept.iter().map(String::as_str);
        self.set.iter().map(|(name, _)| *name).chain(kept)
    }

    /// Gives `command`, which is `mpirun`, this environment.
    pub(super) fn apply(&self, command: &mut Command) {
        for name in &self.remove {
            command.env_remove(name);
        }
        command.envs(self.set.iter().map(|(name, value)| (name, value)));
    }
}

/// Returns a lookup in what the ranks will find, but for their places and their numbers of threads.
pub(super) fn of_ranks(arguments: &Arguments) -> impl Fn(&str) -> Option<String> {
    let set = common(arguments, &Vec::from_iter(std::env::vars_os()), 1);
    move |name| {
        let of_flag = set.iter().find(|(of, _)| *of == name);
        of_flag.map_or_else(|| variable::of_process(name), |(_, value)| Some(value.clone()))
    }
}

/// Returns what the flags tell the ranks and must be the same on all machines.
pub(super) fn of_settings(arguments: &Arguments) -> impl Iterator<Item = (&'static str, String)> {
    let is_kept_memory = |name: &str| KEPT_MEMORY.iter().any(|(of, _)| *of == name);
    let of_host =
        move |name: &str| THREAD_COUNTS.contains(&name) || name == CUDA_VISIBLE_DEVICES || is_kept_memory(name);
    let set = common(arguments, &Vec::from_iter(std::env::vars_os()), 1);
    set.into_iter().filter(move |(name, _)| !of_host(name))
}

/// What the ranks are told whoever starts them: numbers of threads, and the flags.
fn common(arguments: &Arguments, inherited: &[(OsString, OsString)], cores: usize) -> Vec<(&'static str, String)> {
    let given = |name: &str| inherited.iter().any(|(of, value)| of == name && !value.is_empty());
    let mut set = Vec::new();
    for name in THREAD_COUNTS {
        match arguments.num_cpu_threads_per_process {
            Some(threads) => set.push((name, threads.to_string())),
            None if given(name) => {}
            None => set.push((name, cores.max(1).to_string())),
        }
    }

    if arguments.cpu {
        set.push(("ACCELERATE_USE_CPU", "True".to_owned()));
    }
    if arguments.debug {
        set.push(("ACCELERATE_DEBUG_MODE", "true".to_owned()));
    }
    if let Some(ids @ GpuIds::Listed(_)) = &arguments.gpu_ids {
        set.push((CUDA_VISIBLE_DEVICES, ids.to_string()));
    }
    if arguments.enable_cpu_affinity {
        set.push((ACCELERATE_CPU_AFFINITY, "1".to_owned()));
    }
    set.extend(arguments.settings_variables(|name| {
        let found = inherited.iter().find(|(of, _)| of == name);
        found.map(|(_, value)| value.to_string_lossy().into_owned())
    }));
    if let Some(backend) = arguments.backend {
        set.push((SCONCE_BACKEND, backend.backend().name().to_owned()));
    }
    let of_files = &arguments.from_files;
    set.extend(of_files.variables.iter().cloned());
    // What programs in Python expect to find.
    let mut defaults = vec![(ACCELERATE_MIXED_PRECISION, "no")];
    defaults.extend(KEPT_MEMORY);
    if arguments.deepspeed.use_deepspeed {
        set.push((DEEPSPEED_FIELDS, of_files.deepspeed_fields.clone()));
    } else {
        defaults.extend(NOT_COMPILED);
    }
    for (name, value) in defaults {
        if !given(name) && set.iter().all(|(of, _)| *of != name) {
            set.push((name, value.to_owned()));
        }
    }
    set
}

/// Whether a variable leads to the store of a launcher further up, where this one hosts none.
fn is_of_other_store(name: &OsStr, place: &Place) -> bool {
    place.store.is_none() && name == variable::SCONCE_STORE_ADDR
}

fn is_foreign_topology(name: &OsStr) -> bool {
    FOREIGN_TOPOLOGY
        .iter()
        .any(|start| name.as_encoded_bytes().starts_with(start.as_bytes()))
}
