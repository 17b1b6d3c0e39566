//! Finds the executable that the ranks will run, before anything is started.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use crate::command_error::CommandError;

/// Finds the file that `program` names, the way a shell does: a name without a slash is searched in `search_path`
/// (the value of PATH).
///
/// # Errors
/// When there is no such file, or it cannot be executed.
pub(crate) fn find(program: &OsStr, search_path: Option<OsString>) -> Result<PathBuf, CommandError> {
    let named = Path::new(program);
    if named.components().count() != 1 || program.as_encoded_bytes().contains(&b'/') {
        return match executable(named) {
            Ok(()) => Ok(named.to_owned()),
            Err(reason) => Err(refusal(named, &reason)),
        };
    }

    let mut not_executable = None;
    for folder in search_path.iter().flat_map(std::env::split_paths) {
        let candidate = folder.join(named);
        match executable(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(reason) if reason.kind() == io::ErrorKind::NotFound => {}
            Err(reason) => not_executable = not_executable.or(Some((candidate, reason))),
        }
    }
    if let Some((candidate, reason)) = not_executable {
        return Err(refusal(&candidate, &reason));
    }
    let error = CommandError::usage(format!("no program {} in PATH", named.display()));
    Err(if named.is_file() {
        error.hint(format!("for the file in this folder write ./{}", named.display()))
    } else {
        error.hint("give a path such as ./target/release/NAME, or build it: --example NAME, --bin NAME")
    })
}

fn executable(path: &Path) -> io::Result<()> {
    if path.metadata()?.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    Ok(access(path, Access::EXEC_OK)?)
}

fn refusal(path: &Path, reason: &io::Error) -> CommandError {
    let path = path.display();
    match reason.kind() {
        io::ErrorKind::NotFound => CommandError::usage(format!("there is no program at {path}"))
            .hint("check the path, or let cargo build it: --example NAME, --bin NAME"),
        io::ErrorKind::IsADirectory => CommandError::usage(format!("{path} is a folder, not a program")),
        io::ErrorKind::PermissionDenied => CommandError::usage(format!("{path} may not be executed"))
            .hint(format!("if it is a program, allow it: chmod +x {path}")),
        _ => CommandError::usage(format!("cannot execute {path}: {reason}")),
    }
}
