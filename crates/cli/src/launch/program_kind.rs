//! What kind of program the ranks run: an executable, a Python script, or a Python module.
//!
//! As under torchrun, a script is given to the interpreter, whatever its mode and first line say; so that what starts under
//! `accelerate launch train.py` starts the same here.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use clap::Args;

use super::program;
use crate::command_error::CommandError;

/// Names the interpreter of Python scripts; without it python3 and python are looked for in PATH.
const PYTHON: &str = "PYTHON";

/// Flags about the kind of the program.
#[derive(Debug, Args)]
#[command(next_help_heading = "Program")]
pub(super) struct ProgramKind {
    /// PROGRAM is a Python module: start it by `python3 -m` ($PYTHON names another interpreter)
    #[arg(long, short = 'm')]
    pub(super) module: bool,

    /// Start PROGRAM itself although its name ends in .py
    #[arg(long = "no_python", alias = "no-python", conflicts_with = "module")]
    pub(super) no_python: bool,
}

/// A program and its arguments, the same for all ranks of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Program {
    /// The file that is executed.
    pub(super) executable: PathBuf,
    /// What it is told to be called.
    pub(super) name: OsString,
    pub(super) arguments: Vec<OsString>,
}

impl ProgramKind {
    /// The flag that has no effect on a program that cargo builds, if one is given.
    pub(super) fn of_scripts(&self) -> Option<&'static str> {
        let flags = [("--module", self.module), ("--no_python", self.no_python)];
        flags.into_iter().find_map(|(flag, given)| given.then_some(flag))
    }

    /// Finds what is to be executed for `name`, as the user wrote it.
    ///
    /// # Errors
    /// When there is no such program or script, or no interpreter for it.
    pub(super) fn find(&self, name: OsString, arguments: Vec<OsString>) -> Result<Program, CommandError> {
        let search_path = std::env::var_os("PATH");
        if self.module {
            return python(&["-u".as_ref(), "-m".as_ref(), &name], arguments, search_path);
        }
        let script = Path::new(&name);
        if self.no_python || script.extension() != Some("py".as_ref()) {
            return Ok(Program {
                executable: program::find(&name, search_path)?,
                name,
                arguments,
            });
        }
        if !script.is_file() {
            let error = CommandError::usage(format!("there is no script at {}", script.display()));
            return Err(
                error.hint("check the path; --module starts an installed module, --no_python a program in PATH")
            );
        }
        python(&["-u".as_ref(), &name], arguments, search_path)
    }
}

/// Python with `first` and then `arguments`; unbuffered, so that what ranks print shows at once.
fn python(first: &[&OsStr], arguments: Vec<OsString>, search_path: Option<OsString>) -> Result<Program, CommandError> {
    let named = std::env::var_os(PYTHON).filter(|name| !name.is_empty());
    let (executable, name) = match named {
        Some(name) => (program::find(&name, search_path)?, name),
        None => {
            let found = ["python3", "python"]
                .into_iter()
                .find_map(|name| Some((program::find(name.as_ref(), search_path.clone()).ok()?, name.into())));
            found.ok_or_else(|| {
                CommandError::usage("no python3 in PATH")
                    .hint("activate an environment, or name one: PYTHON=/path/python3")
            })?
        }
    };
    let first = first.iter().map(|word| (*word).to_owned());
    Ok(Program {
        executable,
        name,
        arguments: first.chain(arguments).collect(),
    })
}
