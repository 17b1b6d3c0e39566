//! `sconce config`: the files that say what runs are, and what follows from them. Without a subcommand it asks, see
//! [`dialogue`].

mod dialogue;
mod show;
mod update;
mod validate;
mod write_default;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use sconce_collectives::environment::of_process;
use sconce_core::config::default_file;

use crate::command_error::CommandError;
use crate::terminal::print;

/// Ask for the settings of runs and write them to a configuration file; or show, check, write or convert such files
///
/// Without a subcommand: on a terminal there are menus, over a pipe each question is answered by a line. What the file says already
/// is proposed, and settings that no question is about stay.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    file: FileArgument,

    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Show(show::Arguments),
    Validate(validate::Arguments),
    Default(write_default::Arguments),
    Update(update::Arguments),
    Schema(SchemaArguments),
}

/// Print a JSON Schema of configuration files, by which editors complete and check them
#[derive(Debug, Args)]
struct SchemaArguments {}

/// Runs `sconce config`.
///
/// # Errors
/// When files cannot be used, or not be written.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    match &arguments.command {
        Some(Command::Show(arguments)) => show::run(arguments),
        Some(Command::Validate(arguments)) => validate::run(arguments),
        Some(Command::Default(arguments)) => write_default::run(arguments),
        Some(Command::Update(arguments)) => update::run(arguments),
        Some(Command::Schema(_)) => {
            print(&format!("{:#}\n", sconce_core::config::schema()))?;
            Ok(ExitCode::SUCCESS)
        }
        None => dialogue::run(&arguments.file.file()?, arguments.file.config_file.is_none()),
    }
}

/// A file, or the one that is meant where none is named.
#[derive(Debug, Args)]
struct FileArgument {
    /// The file: YAML, or what its name says (.json, .toml)
    /// [default: accelerate/default_config.yaml in HF_HOME, XDG_CACHE_HOME/huggingface or ~/.cache/huggingface]
    #[arg(
        verbatim_doc_comment,
        long = "config_file",
        alias = "config-file",
        value_name = "FILE"
    )]
    config_file: Option<PathBuf>,
}

impl FileArgument {
    fn file(&self) -> Result<PathBuf, CommandError> {
        let file = self.config_file.clone();
        file.or_else(|| default_file(of_process)).ok_or_else(|| {
            CommandError::usage("no --config_file, and no folder for the default one: HOME is not set")
                .hint("name a file: --config_file run.yaml")
        })
    }
}
