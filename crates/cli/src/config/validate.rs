//! `sconce config validate`: whether files can be used, before a run needs them.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::command_error::CommandError;
use crate::launch::configured::check_file;
use crate::terminal::{print, shown};

/// Check configuration files as `sconce launch` would, and say what in them has no effect
///
/// Exit code: 0 when all can be used, 2 when one cannot.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The files
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let mut code = ExitCode::SUCCESS;
    for file in &arguments.files {
        match check_file(file) {
            Ok(warnings) => {
                let warnings = warnings
                    .iter()
                    .map(|warning| format!("  warning: {}\n", warning.trim_start()));
                print(&shown(&format!(
                    "{}: valid\n{}",
                    file.display(),
                    warnings.collect::<String>()
                )))?;
            }
            Err(error) => {
                print(&shown(&format!("{}: not valid\n", file.display())))?;
                error.report();
                code = ExitCode::from(2);
            }
        }
    }
    Ok(code)
}
