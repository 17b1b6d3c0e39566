//! `sconce checkpoint`: what is in a checkpoint, whether it is whole, and how two differ.
//!
//! A checkpoint may come from anyone: names in it are written so that they cannot steer a terminal.

mod diff;
mod inspect;
mod table;
mod verify;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use sconce_core::Checkpoint;

use crate::command_error::CommandError;
use crate::terminal::note;

/// Look into checkpoints: list what they hold, verify them, compare two
///
/// DIR is a checkpoint, or a folder of numbered ones, of which the newest complete one is taken.
#[derive(Debug, Args)]
#[command(arg_required_else_help = true, disable_help_subcommand = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List parameters, optimizer state and objects
    Inspect {
        /// The checkpoint, or a folder of numbered ones
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Write one JSON object in the place of a table
        #[arg(long)]
        json: bool,
    },
    /// Read everything and compare it with its hashes; exit code 1 if anything is damaged
    Verify {
        /// The checkpoint, or a folder of numbered ones
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Go on after the first damage and list all
        #[arg(long)]
        all: bool,
    },
    /// Compare the arrays of two checkpoints; exit code 1 if they differ
    Diff {
        /// The first checkpoint
        #[arg(value_name = "A")]
        first: PathBuf,
        /// The second checkpoint
        #[arg(value_name = "B")]
        second: PathBuf,
        /// Write one JSON object in the place of a table
        #[arg(long)]
        json: bool,
    },
}

/// Runs `sconce checkpoint`.
///
/// # Errors
/// When a checkpoint cannot be read or is damaged, or stdout cannot be written to.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    match &arguments.action {
        Action::Inspect { folder, json } => inspect::run(folder, *json),
        Action::Verify { folder, all } => verify::run(folder, *all),
        Action::Diff { first, second, json } => diff::run(first, second, *json),
    }
}

/// Opens a checkpoint, and says on stderr which ones were passed over.
pub(crate) fn open(folder: &Path) -> Result<Checkpoint, CommandError> {
    let checkpoint = Checkpoint::open(folder).map_err(CommandError::failure)?;
    for skipped in checkpoint.skipped() {
        note(&format!("passed over, {skipped}"));
    }
    Ok(checkpoint)
}
