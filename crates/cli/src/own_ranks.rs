//! Ranks that are this program itself: `sconce test` and `sconce bench` start them by `sconce launch`'s own code, with a
//! subcommand that is not listed, and are told through a file what they found.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use sconce_collectives::environment::of_process;
use sconce_core::config::default_file;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::command_error::CommandError;
use crate::launch;

/// The world that the ranks are started in.
#[derive(Debug, Args)]
pub(crate) struct WorldArguments {
    /// How many ranks to start [default: the configuration's, or 2]
    #[arg(
        long = "num_processes", alias = "num-processes", short = 'n', value_name = "N",
        value_parser = at_least_one
    )]
    num_processes: Option<usize>,

    /// Configuration of the world, as for `sconce launch`
    #[arg(long = "config_file", alias = "config-file", value_name = "FILE")]
    config_file: Vec<PathBuf>,

    /// More flags of `sconce launch` after `--`, such as --backend mpi
    #[arg(last = true, value_name = "LAUNCH_FLAGS")]
    launch_flags: Vec<OsString>,
}

impl WorldArguments {
    /// Starts this program's hidden subcommand on every rank; returns how the launcher ended, and the values that rank 0 told,
    /// also where some rank failed. Must be called on the main thread.
    ///
    /// # Errors
    /// When nothing could be started.
    pub(crate) fn run<T: DeserializeOwned>(
        &self,
        subcommand: &str,
        arguments: impl IntoIterator<Item = OsString>,
    ) -> Result<(ExitCode, Vec<T>), CommandError> {
        let cannot = |what: &str, reason: io::Error| CommandError::failure(format!("cannot {what}: {reason}"));
        let results = ResultsFile::new().map_err(|reason| cannot("make a file for results", reason))?;
        let program = std::env::current_exe().map_err(|reason| cannot("find this program's own file", reason))?;
        let mut words = Vec::new();
        for file in &self.config_file {
            words.extend(["--config_file".into(), file.into()]);
        }
        // What a configuration says of it counts, also the one that is read where none is named.
        let by_default = default_file(of_process).is_some_and(|file| file.is_file());
        let is_configured = by_default || !self.config_file.is_empty();
        let ranks = self.num_processes.or((!is_configured).then_some(2));
        words.extend(
            ranks
                .into_iter()
                .flat_map(|ranks| ["--num_processes".into(), ranks.to_string().into()]),
        );
        words.extend(self.launch_flags.iter().cloned());
        words.extend([program.as_os_str(), OsStr::new(subcommand), results.0.as_os_str()].map(OsStr::to_owned));
        words.extend(arguments);
        let ended = launch::run_words(&words)?;
        Ok((ended, results.read()))
    }
}

/// Adds a value to the file that the command reads; called by rank 0.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn tell_result(results: &Path, value: &impl Serialize) -> Result<(), CommandError> {
    let cannot_write = |reason: &dyn std::fmt::Display| {
        CommandError::failure(format!("{}: cannot be written: {reason}", results.display()))
    };
    let line = serde_json::to_string(value).map_err(|error| cannot_write(&error))? + "\n";
    let file = fs::OpenOptions::new().append(true).open(results);
    file.and_then(|mut file| file.write_all(line.as_bytes()))
        .map_err(|error| cannot_write(&error))
}

/// A file that rank 0 writes values to, one a line; removed at the end.
struct ResultsFile(PathBuf);

impl ResultsFile {
    fn new() -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("sconce-results-{}.jsonl", std::process::id()));
        fs::File::create_new(&path)?;
        Ok(Self(path))
    }

    fn read<T: DeserializeOwned>(&self) -> Vec<T> {
        let text = fs::read_to_string(&self.0).unwrap_or_default();
        text.lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }
}

impl Drop for ResultsFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Parses a whole number from 1.
///
/// # Errors
/// For anything else.
pub(crate) fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("a whole number of at least 1 is needed".to_owned()),
        Ok(count) => Ok(count),
    }
}
