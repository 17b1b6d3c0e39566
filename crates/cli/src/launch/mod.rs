//! `sconce launch`: starts a program once per rank, on this machine or several, and supervises the ranks.
//!
//! In reading order: the flags ([`arguments`], [`machines`], [`log_files`], [`deepspeed`], [`fully_sharded`], [`mesh`],
//! [`fp8`]; [`foreign_flags`]) with what configuration files add ([`configured`]), and what they ask for together
//! ([`settings`], [`gpu_ids`]); which machines take part ([`surroundings`]); the executable, built
//! ([`build`]) or found ([`program_kind`], [`program`]); what the
//! ranks are told ([`place`], [`environment`], [`main_process`], [`rendezvous`]); their cores ([`cpu_affinity`],
//! [`gpu_nodes`], [`host_topology`]); each rank as a process ([`rank_process`], [`parent_death`]); their output
//! ([`output`], [`error_file`]); watching them ([`mod@round`], [`mod@supervise`], [`stop_signals`], [`failure`]); and
//! round after round, on this machine ([`alone`]) or with the launchers of others ([`agents`]).
//! Over MPI the ranks are `mpirun`'s ([`mpirun`]), which is watched in their place ([`rank_tags`]).

mod agents;
mod alone;
mod arguments;
mod build;
pub(crate) mod configured;
mod console;
mod cpu_affinity;
mod deepspeed;
mod dry_run;
mod environment;
mod error_file;
mod failure;
mod foreign_flags;
mod fp8;
mod fully_sharded;
mod gpu_ids;
mod gpu_nodes;
mod host_topology;
mod line_splitter;
mod log_files;
mod machines;
mod main_process;
mod mesh;
mod mpirun;
mod output;
mod parent_death;
mod place;
pub(crate) mod program;
mod program_kind;
mod rank_process;
mod rank_tags;
mod rendezvous;
mod rendezvous_conf;
mod round;
mod settings;
mod stop_signals;
mod supervise;
mod surroundings;

use std::ffi::OsString;
use std::io;
use std::process::ExitCode;
use std::thread::available_parallelism;

pub(crate) use arguments::Arguments;
pub(crate) use foreign_flags::refusal;

use crate::command_error::CommandError;
use crate::terminal::{be_quiet, tell};
use arguments::Target;
use console::Console;
use cpu_affinity::CpuAffinity;
use environment::JobEnvironment;
use gpu_nodes::gpu_nodes;
use host_topology::HostTopology;
use log_files::LogFiles;
use main_process::MainProcess;
use mpirun::Mpirun;
use program_kind::Program;
use round::{Job, start_job, watch};
use sconce_collectives::Backend;
use sconce_collectives::environment as variable;
use stop_signals::StopSignals;
use supervise::Nobody;
use surroundings::Machines;

/// More ranks on one host than any has cores for.
const MOST_RANKS: usize = 1024;

/// Runs `sconce launch` with the words that follow it, and the configuration files that they name or that is read by
/// default. Must be called on the main thread.
///
/// # Errors
/// As [`run`], and for files that cannot be used.
pub(crate) fn run_words(words: &[OsString]) -> Result<ExitCode, CommandError> {
    let arguments = configured::arguments(words)?;
    if arguments.quiet {
        be_quiet();
    }
    run(&arguments).map_err(|error| arguments.from_files.explain(error))
}

/// Runs `sconce launch`. Must be called on the main thread.
///
/// # Errors
/// When nothing could be started. Failures of the ranks are reported on stderr and told by the exit code.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    stop_signals::keep_ended_children()
        .map_err(|reason| CommandError::failure(format!("cannot catch SIGCHLD: {reason}")))?;
    let (target, program_arguments) = arguments.target()?;
    let machines = Machines::resolve(arguments, variable::of_process)?;
    let of_ranks = environment::of_ranks(arguments);
    let warning = settings::check(arguments, machines.ranks(), &of_ranks)?;
    let backend = mpirun::backend(arguments, &of_ranks)?;
    let mpirun = match backend {
        Backend::Mpi => Some(Mpirun::find(arguments, &machines)?),
        _ => None,
    };
    let local_ranks = machines.local_ranks;
    if mpirun.is_none() && local_ranks > MOST_RANKS {
        return Err(CommandError::usage(format!(
            "--num_processes {}: at most {MOST_RANKS} ranks are started on one host; for more hosts see --num_machines",
            machines.ranks()
        )));
    }
    let ranks_per_host = match &mpirun {
        Some(mpirun) => mpirun.ranks_per_host(machines.ranks()),
        None => Some(local_ranks),
    };
    gpu_ids::check(arguments, ranks_per_host, &of_ranks)?;
    let binds = cpu_affinity::is_wanted(&of_ranks)?;
    let program = match target {
        Target::Program(name) => arguments.kind.find(name, program_arguments)?,
        Target::Cargo(target) => {
            let executable = build::build(&target)?;
            Program {
                name: executable.clone().into(),
                executable,
                arguments: program_arguments,
            }
        }
    };
    if let Some(warning) = warning {
        tell(&warning);
    }
    let cores = available_parallelism().map_or(1, usize::from);
    let host = HostTopology::of_host();
    if let Some(mpirun) = mpirun {
        let (ranks, per_host) = (local_ranks, ranks_per_host.unwrap_or(local_ranks));
        let binding = binds
            .then(|| mpirun.binding(&host, per_host).map_err(not_bound).ok())
            .flatten();
        let environment = JobEnvironment::new(arguments, std::env::vars_os(), cores / per_host);
        let command = mpirun.command(ranks, binding, &environment, &program.executable, &program.arguments);
        if arguments.dry_run {
            return dry_run::print_job(&command);
        }
        let console = Console::new(ranks > 1 && !arguments.no_prefix);
        let mut signals = StopSignals::catch().map_err(no_signals)?;
        let start = || start_job(command, console);
        let end = watch(start, mpirun.program(), arguments.kill_grace, &mut signals, &mut Nobody)?;
        return alone::conclude(end, failure::report_job);
    }
    let affinity = binds
        .then(|| {
            let nodes = gpu_nodes(&host, local_ranks, backend, &of_ranks);
            CpuAffinity::split(&host, &nodes).map_err(not_bound).ok()
        })
        .flatten();
    // A rank's node may have fewer than its share, and a quota may leave fewer than there are.
    let fewest = affinity.as_ref().map_or(usize::MAX, CpuAffinity::fewest);
    let job = Job {
        arguments,
        program,
        affinity,
        cores: (cores / local_ranks).min(fewest),
        files: LogFiles::new(&arguments.logs)?,
    };
    if arguments.dry_run {
        return dry_run::print_ranks(&job, &machines);
    }
    if machines.is_alone() {
        let main_process = MainProcess::choose(arguments.main_process_ip.as_deref(), arguments.main_process_port)?;
        return alone::run(&job, arguments, local_ranks, main_process, machines.run_id());
    }
    agents::run(&job, &machines)
}

/// Counts this host's GPUs on the PCI bus.
pub(crate) fn gpus_of_host() -> usize {
    HostTopology::of_host().gpus().len()
}

/// Tells why ranks are not bound to cores, although that was asked for.
fn not_bound(reason: String) {
    tell(&format!("notice: ranks are not bound to cores: {reason}\n"));
}

fn no_signals(reason: io::Error) -> CommandError {
    CommandError::failure(format!("cannot catch signals: {reason}"))
}
