//! One round of a run on this machine: the ranks are started, watched, and gone before anything is said of them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::arguments::Arguments;
use super::console::Console;
use super::cpu_affinity::CpuAffinity;
use super::environment::Environment;
use super::error_file;
use super::log_files::{LogFiles, RankFiles};
use super::output::{LastLines, Output};
use super::place::Place;
use super::program_kind::Program;
use super::rank_process::{Group, RankProcess};
use super::rank_tags::Writer;
use super::stop_signals::StopSignals;
use super::supervise::{Others, Outcome, supervise};
use crate::command_error::CommandError;
use sconce_core::environment::TORCHELASTIC_ERROR_FILE;

/// What this machine starts in every round.
#[derive(Debug)]
pub(super) struct Job<'a> {
    pub(super) arguments: &'a Arguments,
    pub(super) program: Program,
    /// The cores of each rank, where they are bound.
    pub(super) affinity: Option<CpuAffinity>,
    /// The number of cores of one rank.
    pub(super) cores: usize,
    pub(super) files: LogFiles,
}

/// How a round went on this machine.
#[derive(Debug)]
pub(super) struct RoundEnd {
    pub(super) outcome: Outcome,
    /// The number in the world of this machine's first rank.
    pub(super) first_rank: usize,
    /// The process ids, by local rank.
    pub(super) pids: Vec<u32>,
    /// Where known, the end of each rank's stderr.
    pub(super) last_lines: BTreeMap<Writer, LastLines>,
    /// What ranks have left in their error files, by local rank.
    pub(super) errors: BTreeMap<usize, String>,
    pub(super) lost_output: Option<CommandError>,
}

/// Processes that were started, and what carries their output unless they have the launcher's own.
pub(super) type Started = (Vec<RankProcess>, Option<Output>);

impl Job<'_> {
    /// Runs one round: returns when no rank of this machine runs any more.
    ///
    /// # Errors
    /// When ranks cannot be started or watched; none is left then.
    pub(super) fn run(
        &self,
        place: &Place,
        signals: &mut StopSignals,
        others: &mut dyn Others,
    ) -> Result<RoundEnd, CommandError> {
        let executable = &self.program.executable;
        let made = (0..place.local_ranks).map(|local_rank| self.files.of_rank(place, local_rank));
        let files: Vec<RankFiles> = made
            .collect::<io::Result<_>>()
            .map_err(|reason| CommandError::failure(format!("cannot make the ranks' files: {reason}")))?;
        let error_files: Vec<PathBuf> = files.iter().map(|files| files.error.clone()).collect();
        let environment = self.environment(place);
        let has_others = place.world_size() > 1 || self.files.has_streams();
        let start = || {
            if !has_others {
                let command = self.command(place, &environment, 0, &error_files[0]);
                return bound(self.affinity.as_ref(), 0, || start_one(command));
            }
            let mut output = Output::new(Console::new(place.world_size() > 1 && !self.arguments.no_prefix))?;
            let mut ranks = Vec::new();
            for (local_rank, files) in files.into_iter().enumerate() {
                let command = piped(self.command(place, &environment, local_rank, &files.error));
                let start = || RankProcess::spawn(command, Group::Own);
                let mut process = bound(self.affinity.as_ref(), local_rank, start)?;
                output.carry(
                    place.rank(local_rank),
                    process.child_mut(),
                    [files.stdout, files.stderr],
                )?;
                ranks.push(process);
            }
            Ok((ranks, Some(output)))
        };
        let mut end = watch(start, executable, self.arguments.kill_grace, signals, others)?;
        end.first_rank = place.rank(0);
        let errors = error_files.iter().enumerate();
        end.errors = errors
            .filter_map(|(local_rank, path)| Some((local_rank, error_file::read(path)?)))
            .collect();
        Ok(end)
    }

    /// The environment of this machine's ranks.
    pub(super) fn environment(&self, place: &Place) -> Environment {
        Environment::new(self.arguments, place, std::env::vars_os(), self.cores)
    }

    /// The command of one rank.
    pub(super) fn command(
        &self,
        place: &Place,
        environment: &Environment,
        local_rank: usize,
        error_file: &Path,
    ) -> Command {
        let Program {
            executable,
            name,
            arguments,
        } = &self.program;
        let mut command = Command::new(executable);
        command.arg0(name).args(arguments);
        environment.apply(place, local_rank, &mut command);
        command.env(TORCHELASTIC_ERROR_FILE, error_file);
        command
    }

    /// The words of a rank's command, as a user would type them.
    pub(super) fn words(&self) -> impl Iterator<Item = OsString> {
        let executable = self.program.executable.clone().into_os_string();
        std::iter::once(executable).chain(self.program.arguments.iter().cloned())
    }
}

/// Starts processes of `executable` by `start` and watches them until all have ended.
///
/// # Errors
/// When they cannot be started or watched.
pub(super) fn watch(
    start: impl FnOnce() -> io::Result<Started>,
    executable: &Path,
    grace: Duration,
    signals: &mut StopSignals,
    others: &mut dyn Others,
) -> Result<RoundEnd, CommandError> {
    let cannot_start = |reason| CommandError::failure(format!("cannot start {}: {reason}", executable.display()));
    let started = Instant::now();
    let (ranks, output) = start().map_err(cannot_start)?;
    let outcome = supervise(&ranks, signals, grace, started, others)
        .map_err(|reason| CommandError::failure(format!("lost sight of the ranks: {reason}")))?;
    let pids = Vec::from_iter(ranks.iter().map(RankProcess::pid));
    // Ends what the ranks have left running, so that their output ends too.
    drop(ranks);
    let carried = output.map(Output::finish).unwrap_or_default();
    let lost_output = carried.failure.map(|(stream, reason)| {
        CommandError::failure(format!("could not write the ranks' output to {stream}: {reason}"))
    });
    Ok(RoundEnd {
        outcome,
        first_rank: 0,
        pids,
        last_lines: carried.last_lines,
        errors: BTreeMap::new(),
        lost_output,
    })
}

/// Starts `mpirun`, with no input, and output that goes to `console`.
pub(super) fn start_job(command: Command, console: Console) -> io::Result<Started> {
    let mut output = Output::new(console)?;
    let mut mpirun = RankProcess::spawn(piped(command), Group::Job)?;
    output.carry_tagged(mpirun.child_mut())?;
    Ok((vec![mpirun], Some(output)))
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

/// Starts a rank by `start`, on cores of its own where ranks are bound.
fn bound<T>(affinity: Option<&CpuAffinity>, rank: usize, start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    match affinity {
        Some(affinity) => affinity.start(rank, start),
        None => start(),
    }
}

fn piped(mut command: Command) -> Command {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}
