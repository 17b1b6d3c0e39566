//! `sconce launch`: starts a program once per rank on this host, and supervises the ranks.
//!
//! In reading order: the flags ([`arguments`], [`deepspeed`], [`fully_sharded`], [`mesh`], [`fp8`]; [`foreign_flags`]) with
//! what configuration files add ([`configured`]), and what they ask for together
//! ([`settings`], [`gpu_ids`]); the executable, built ([`build`]) or found ([`program`]); what the
//! ranks are told ([`environment`], [`main_process`], [`rendezvous`]); their cores ([`cpu_affinity`], [`gpu_nodes`],
//! [`host_topology`]); each rank as a process ([`rank_process`],
//! [`parent_death`]); their output ([`output`]); and watching them ([`mod@supervise`], [`stop_signals`], [`failure`]).
//! Over MPI the ranks are `mpirun`'s ([`mpirun`]), which is watched in their place ([`rank_tags`]).

mod arguments;
mod build;
pub(crate) mod configured;
mod console;
mod cpu_affinity;
mod deepspeed;
mod environment;
mod failure;
mod foreign_flags;
mod fp8;
mod fully_sharded;
mod gpu_ids;
mod gpu_nodes;
mod host_topology;
mod line_splitter;
mod main_process;
mod mesh;
mod mpirun;
mod output;
mod parent_death;
pub(crate) mod program;
mod rank_process;
mod rank_tags;
mod rendezvous;
mod settings;
mod stop_signals;
mod supervise;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::thread::available_parallelism;
use std::time::Instant;

pub(crate) use arguments::Arguments;
pub(crate) use foreign_flags::refusal;

use crate::command_error::CommandError;
use crate::terminal::tell;
use arguments::Target;
use console::Console;
use cpu_affinity::CpuAffinity;
use environment::{Environment, JobEnvironment};
use gpu_nodes::gpu_nodes;
use host_topology::HostTopology;
use main_process::MainProcess;
use mpirun::Mpirun;
use output::{LastLines, Output};
use rank_process::{Group, RankProcess};
use rank_tags::Writer;
use rendezvous::Rendezvous;
use sconce_collectives::Backend;
use stop_signals::StopSignals;
use supervise::{Cause, Outcome, supervise};

/// More ranks on one host than any has cores for.
const MOST_RANKS: usize = 1024;

/// Runs `sconce launch` with the words that follow it, and the configuration files that they name or that is read by
/// default. Must be called on the main thread.
///
/// # Errors
/// As [`run`], and for files that cannot be used.
pub(crate) fn run_words(words: &[OsString]) -> Result<ExitCode, CommandError> {
    let arguments = configured::arguments(words)?;
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
    let of_ranks = environment::of_ranks(arguments);
    let warning = settings::check(arguments, &of_ranks)?;
    let backend = mpirun::backend(arguments, &of_ranks)?;
    let mpirun = match backend {
        Backend::Mpi => Some(Mpirun::find(arguments)?),
        _ => None,
    };
    let ranks = arguments.num_processes;
    if mpirun.is_none() && ranks > MOST_RANKS {
        return Err(CommandError::usage(format!(
            "--num_processes {ranks}: at most {MOST_RANKS} ranks are started on one host; for more hosts see --mpirun_hostfile"
        )));
    }
    let ranks_per_host = match &mpirun {
        Some(mpirun) => mpirun.ranks_per_host(ranks),
        None => Some(ranks),
    };
    gpu_ids::check(arguments, ranks_per_host, &of_ranks)?;
    let binds = cpu_affinity::is_wanted(&of_ranks)?;
    let main_process = MainProcess::choose(arguments.main_process_ip.as_deref(), arguments.main_process_port)?;
    let (executable, name) = match target {
        Target::Program(name) => (program::find(&name, std::env::var_os("PATH"))?, name),
        Target::Cargo(target) => {
            let executable = build::build(&target)?;
            (executable.clone(), executable.into())
        }
    };
    if let Some(warning) = warning {
        arguments.tell(&warning);
    }
    let cores = available_parallelism().map_or(1, usize::from);
    let host = HostTopology::of_host();
    let console = Console::new(ranks > 1 && !arguments.no_prefix);
    if let Some(mpirun) = mpirun {
        let per_host = ranks_per_host.unwrap_or(ranks);
        let binding = binds
            .then(|| mpirun.binding(&host, per_host).map_err(not_bound).ok())
            .flatten();
        let environment = JobEnvironment::new(arguments, std::env::vars_os(), cores / per_host);
        let command = mpirun.command(ranks, binding, &environment, &executable, &program_arguments);
        let start = || start_job(command, console);
        return watch(start, mpirun.program(), arguments, failure::report_job);
    }
    let affinity = binds
        .then(|| {
            let nodes = gpu_nodes(&host, ranks, backend, &of_ranks);
            CpuAffinity::split(&host, &nodes).map_err(not_bound).ok()
        })
        .flatten();
    // A rank's node may have fewer than its share, and a quota may leave fewer than there are.
    let fewest = affinity.as_ref().map_or(usize::MAX, CpuAffinity::fewest);
    let cores = (cores / ranks).min(fewest);
    let rendezvous = Rendezvous::host()?;
    let environment = Environment::new(
        arguments,
        &main_process,
        rendezvous.variables(),
        std::env::vars_os(),
        cores,
    );
    let command_of = |rank| {
        let mut command = Command::new(&executable);
        command.arg0(&name).args(&program_arguments);
        environment.apply(rank, &mut command);
        command
    };
    let start = || match ranks {
        1 => bound(affinity.as_ref(), 0, || start_one(command_of(0))),
        count => start_several((0..count).map(command_of), affinity.as_ref(), console),
    };
    watch(start, &executable, arguments, failure::report)
}

/// Counts this host's GPUs on the PCI bus.
pub(crate) fn gpus_of_host() -> usize {
    HostTopology::of_host().gpus().len()
}

/// Processes that were started, and what carries their output unless they have the launcher's own.
type Started = (Vec<RankProcess>, Option<Output>);

/// Starts processes of `executable` by `start` and watches them until all have ended. What stopped them is told by
/// `report`, from the cause, how they ended, their ids and the last lines of stderr.
fn watch(
    start: impl FnOnce() -> io::Result<Started>,
    executable: &Path,
    arguments: &Arguments,
    report: impl Fn(Cause, &Outcome, &[u32], &BTreeMap<Writer, LastLines>) -> String,
) -> Result<ExitCode, CommandError> {
    let cannot_start = |reason| CommandError::failure(format!("cannot start {}: {reason}", executable.display()));
    let mut signals = StopSignals::catch().map_err(cannot_start)?;
    let started = Instant::now();
    let (ranks, output) = start().map_err(cannot_start)?;
    let outcome = supervise(&ranks, &mut signals, arguments.kill_grace, started)
        .map_err(|reason| CommandError::failure(format!("lost sight of the ranks: {reason}")))?;
    let pids = Vec::from_iter(ranks.iter().map(RankProcess::pid));
    // Ends what the ranks have left running, so that their output ends too.
    drop(ranks);
    let carried = output.map(Output::finish).unwrap_or_default();

    let lost_output = carried.failure.map(|(stream, reason)| {
        CommandError::failure(format!("could not write the ranks' output to {stream}: {reason}"))
    });
    match (outcome.cause, lost_output) {
        (None, None) => Ok(ExitCode::SUCCESS),
        (None, Some(error)) => Err(error),
        (Some(cause), lost_output) => {
            if let Some(error) = lost_output {
                error.report();
            }
            if !arguments.quiet {
                tell(&report(cause, &outcome, &pids, &carried.last_lines));
            }
            Ok(ExitCode::from(outcome.exit_code()))
        }
    }
}

/// Starts a rank by `start`, on cores of its own where ranks are bound.
fn bound<T>(affinity: Option<&CpuAffinity>, rank: usize, start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    match affinity {
        Some(affinity) => affinity.start(rank, start),
        None => start(),
    }
}

/// Tells why ranks are not bound to cores, although that was asked for.
fn not_bound(reason: String) {
    tell(&format!("notice: ranks are not bound to cores: {reason}\n"));
}

/// Starts a single rank, with the launcher's own input and output.
fn start_one(command: Command) -> io::Result<Started> {
    let group = if io::stdin().is_terminal() {
        Group::Launcher
    } else {
        Group::Own
    };
    Ok((vec![RankProcess::spawn(command, group)?], None))
}

/// Starts one rank per command, with no input, and output that goes to `console`. If one cannot be started, none stays.
fn start_several(
    commands: impl Iterator<Item = Command>,
    affinity: Option<&CpuAffinity>,
    console: Console,
) -> io::Result<Started> {
    let mut output = Output::new(console)?;
    let mut ranks = Vec::new();
    for (rank, command) in commands.enumerate() {
        let mut process = bound(affinity, rank, || RankProcess::spawn(piped(command), Group::Own))?;
        output.carry(rank, process.child_mut())?;
        ranks.push(process);
    }
    Ok((ranks, Some(output)))
}

/// Starts `mpirun`, likewise.
fn start_job(command: Command, console: Console) -> io::Result<Started> {
    let mut output = Output::new(console)?;
    let mut mpirun = RankProcess::spawn(piped(command), Group::Job)?;
    output.carry_tagged(mpirun.child_mut())?;
    Ok((vec![mpirun], Some(output)))
}

fn piped(mut command: Command) -> Command {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}
