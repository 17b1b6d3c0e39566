//! `sconce to-fsdp2`: a configuration file for FSDP's second version, from one for the first.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use sconce_core::config::Configuration;

use crate::command_error::CommandError;
use crate::terminal::{note, print};

/// Convert a configuration file for FSDP's version 1 to version 2
///
/// What version 2 does not have is left out, and named. Comments do not survive. A file that is for version 2 already is
/// not written.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The file to convert
    #[arg(long = "config_file", alias = "config-file", value_name = "FILE")]
    config_file: PathBuf,

    /// Write the result in its place
    #[arg(long, conflicts_with = "output_file")]
    overwrite: bool,

    /// Where to write the result; with --overwrite instead, in place
    #[arg(long = "output_file", alias = "output-file", value_name = "FILE")]
    output_file: Option<PathBuf>,
}

/// Runs `sconce to-fsdp2`.
///
/// # Errors
/// When the file cannot be read or is none for FSDP, or nothing can be written.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let output = match (&arguments.output_file, arguments.overwrite) {
        (Some(file), _) if file.exists() => {
            return Err(CommandError::failure(format!("{} is there already", file.display()))
                .hint("name another file, or convert in place: --overwrite"));
        }
        (Some(file), _) => file,
        (None, true) => &arguments.config_file,
        (None, false) => {
            return Err(
                CommandError::usage("where to write the result?").hint("give --output_file FILE or --overwrite")
            );
        }
    };
    let configuration = Configuration::read(&arguments.config_file).map_err(CommandError::usage)?;
    for warning in configuration.warnings() {
        note(&warning.to_string());
    }
    let Some(converted) = configuration.to_fsdp2().map_err(CommandError::usage)? else {
        note(&format!(
            "{} is for version 2 already; nothing is written",
            arguments.config_file.display()
        ));
        return Ok(ExitCode::SUCCESS);
    };
    converted.notes.iter().for_each(|line| note(line));
    converted
        .configuration
        .write(output, &|_| None)
        .map_err(CommandError::failure)?;
    print(&format!("wrote {}\n", output.display()))?;
    Ok(ExitCode::SUCCESS)
}
