//! `sconce config`: makes the file that says what runs are. Without a subcommand it asks, see [`dialogue`].

mod default_file;
mod dialogue;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::command_error::CommandError;
use default_file::default_file;

/// Ask for the settings of runs, and write them to a configuration file
///
/// On a terminal there are menus; over a pipe each question is answered by a line. What the file says already is proposed,
/// and settings that no question is about stay.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The file to write: YAML, or what its name says (.json, .toml)
    /// [default: accelerate/default_config.yaml in HF_HOME, XDG_CACHE_HOME/huggingface or ~/.cache/huggingface]
    #[arg(
        verbatim_doc_comment,
        long = "config_file",
        alias = "config-file",
        value_name = "FILE"
    )]
    config_file: Option<PathBuf>,
}

/// Runs `sconce config`.
///
/// # Errors
/// When there is nobody to ask, or the file cannot be read or written.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    match &arguments.config_file {
        Some(file) => dialogue::run(file, false),
        None => dialogue::run(&default_file()?, true),
    }
}
