//! `sconce checkpoint verify`: whether everything in a checkpoint is as it was written.

use std::path::Path;
use std::process::ExitCode;

use super::{failure, open, print, shown};
use crate::command_error::CommandError;

/// Runs `sconce checkpoint verify`.
pub(super) fn run(folder: &Path, all: bool) -> Result<ExitCode, CommandError> {
    let mut checkpoint = open(folder)?;
    let verified = checkpoint.verify(all);
    let folder = shown(&checkpoint.folder().display().to_string());
    match &verified.damages[..] {
        [] => {
            print(&format!(
                "{folder}: whole, {} bytes of arrays are as they were written\n",
                verified.bytes
            ))?;
            Ok(ExitCode::SUCCESS)
        }
        [first] if !all => Err(failure(first).hint("--all lists all damage")),
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
