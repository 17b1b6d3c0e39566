//! `sconce checkpoint verify`: whether everything in a checkpoint is as it was written.

use std::path::Path;
use std::process::ExitCode;

use super::open;
use crate::command_error::CommandError;
use crate::terminal::{print, shown};

/// Runs `sconce checkpoint verify`.
pub(super) fn run(folder: &Path, all: bool) -> Result<ExitCode, CommandError> {
    let mut checkpoint = open(folder)?;
    let verified = checkpoint.verify(all);
    let folder = checkpoint.folder().display().to_string();
    match &verified.damages[..] {
        [] => {
            print(&format!(
                "{}: whole, {} bytes of arrays are as they were written\n",
                shown(&folder),
                verified.bytes
            ))?;
            Ok(ExitCode::SUCCESS)
        }
        [first] if !all => Err(CommandError::failure(first).hint("--all lists all damage")),
        damages => {
            let lines = damages
                .iter()
                .map(|damage| shown(&damage.to_string()).replace('\n', "\\n") + "\n");
            print(&lines.collect::<String>())?;
            Err(CommandError::failure(format!(
                "{folder}: damaged in {} places",
                damages.len()
            )))
        }
    }
}
