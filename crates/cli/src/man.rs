//! `sconce man`: manual pages, from the definition that parses the command line.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Command};
use clap_mangen::Man;

use crate::cli;
use crate::command_error::CommandError;
use crate::terminal::{print, shown};

/// Print a manual page, or write those of all commands into a folder
///
/// To read one: sconce man launch | man -l -
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The command whose page to print, such as `launch` or `checkpoint verify`; by default that of sconce itself
    #[arg(value_name = "COMMAND", conflicts_with = "out")]
    command: Vec<String>,

    /// Write the pages of all commands into this folder, which is made if it is not there
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Runs `sconce man`.
///
/// # Errors
/// When there is no such command, or the pages cannot be written.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let mut sconce = cli::definition();
    // Gives subcommands their full names.
    sconce.build();
    match &arguments.out {
        Some(folder) => write_all(sconce, folder)?,
        None => {
            let mut page = Vec::new();
            let rendered = Man::new(named(&sconce, &arguments.command)?.clone()).render(&mut page);
            rendered.map_err(|reason| CommandError::failure(format!("cannot make the page: {reason}")))?;
            print(&String::from_utf8_lossy(&page))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The command that `words` lead to.
fn named<'a>(sconce: &'a Command, words: &[String]) -> Result<&'a Command, CommandError> {
    words.iter().try_fold(sconce, |command, word| {
        command.find_subcommand(word).ok_or_else(|| {
            let names = Vec::from_iter(command.get_subcommands().map(Command::get_name)).join(", ");
            CommandError::usage(format!("{} has no command {word:?}", command.get_name())).hint(if names.is_empty() {
                format!("{} has none", command.get_name())
            } else {
                format!("there are {names}")
            })
        })
    })
}

fn write_all(sconce: Command, folder: &Path) -> Result<(), CommandError> {
    let shown_folder = shown(&folder.display().to_string());
    fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(sconce, folder))
        .map_err(|reason| CommandError::failure(format!("cannot write manual pages to {shown_folder}: {reason}")))?;
    print(&format!("wrote manual pages to {shown_folder}\n"))
}
