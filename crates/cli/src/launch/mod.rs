//! `sconce launch`: starts a program once per rank on this host, and supervises the ranks.
//!
//! In reading order: the flags ([`arguments`]); the executable, built ([`build`]) or found ([`program`]); what the
//! ranks are told ([`environment`], [`main_process`], [`rendezvous`]); each rank as a process ([`rank_process`],
//! [`parent_death`]); their output ([`output`]); and watching them ([`supervise`], [`stop_signals`], [`failure`]).

mod arguments;
mod build;
mod console;
mod environment;
mod failure;
mod line_splitter;
mod main_process;
mod output;
mod parent_death;
mod program;
mod rank_process;
mod rendezvous;
mod stop_signals;
mod supervise;

use std::io::{self, IsTerminal, Write};
use std::process::{Command, ExitCode, Stdio};
use std::thread::available_parallelism;
use std::time::Instant;

pub(crate) use arguments::Arguments;

use crate::command_error::CommandError;
use arguments::Target;
use console::Console;
use environment::Environment;
use main_process::MainProcess;
use output::Output;
use rank_process::{Group, RankProcess};
use rendezvous::Rendezvous;
use stop_signals::StopSignals;
use supervise::supervise;

/// Runs `sconce launch`. Must be called on the main thread.
///
/// # Errors
/// When nothing could be started. Failures of the ranks are reported on stderr and told by the exit code.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    stop_signals::keep_ended_children()
        .map_err(|reason| CommandError::failure(format!("cannot catch SIGCHLD: {reason}")))?;
    let (target, program_arguments) = arguments.target()?;
    let main_process = MainProcess::choose(arguments.main_process_ip.as_deref(), arguments.main_process_port)?;
    let (executable, name) = match target {
        Target::Program(name) => (program::find(&name, std::env::var_os("PATH"))?, Some(name)),
        Target::Cargo(target) => (build::build(&target)?, None),
    };
    let rendezvous = Rendezvous::host()?;
    let cores = available_parallelism().map_or(1, usize::from);
    let environment = Environment::new(
        arguments,
        &main_process,
        rendezvous.variables(),
        std::env::vars_os(),
        cores,
    );

    let command_of = |rank| {
        let mut command = Command::new(&executable);
        if let Some(name) = &name {
            std::os::unix::process::CommandExt::arg0(&mut command, name);
        }
        command.args(&program_arguments);
        environment.apply(rank, &mut command);
        command
    };
    let cannot_start = |rank: usize, reason: io::Error| {
        CommandError::failure(format!("cannot start rank {rank} ({}): {reason}", executable.display()))
    };

    let mut signals = StopSignals::catch().map_err(|reason| cannot_start(0, reason))?;
    let started = Instant::now();
    let mut output = None;
    let mut ranks = Vec::with_capacity(environment.world_size());
    if environment.world_size() == 1 {
        let group = if io::stdin().is_terminal() {
            Group::Launcher
        } else {
            Group::Own
        };
        ranks.push(RankProcess::spawn(command_of(0), group).map_err(|reason| cannot_start(0, reason))?);
    } else {
        let output =
            output.insert(Output::new(Console::new(!arguments.no_prefix)).map_err(|reason| cannot_start(0, reason))?);
        for rank in 0..environment.world_size() {
            let mut command = command_of(rank);
            command
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let mut process = RankProcess::spawn(command, Group::Own).map_err(|reason| cannot_start(rank, reason))?;
            output
                .carry(rank, process.child_mut())
                .map_err(|reason| cannot_start(rank, reason))?;
            ranks.push(process);
        }
    }

    let outcome = supervise(&ranks, &mut signals, arguments.kill_grace, started)
        .map_err(|reason| CommandError::failure(format!("lost sight of the ranks: {reason}")))?;
    let pids = Vec::from_iter(ranks.iter().map(RankProcess::pid));
    // Ends what the ranks have left running, so that their output ends too.
    drop(ranks);
    let last_lines = output.map(Output::finish).unwrap_or_default();
    if let Some(cause) = outcome.cause {
        let report = failure::report(cause, &outcome, &pids, &last_lines);
        // A stderr that nobody reads leaves the exit code to tell it.
        let _ = io::stderr().lock().write_all(report.as_bytes());
    }
    Ok(ExitCode::from(outcome.exit_code()))
}
