//! What a subcommand returns when it cannot do its work: a kind, which decides the exit code, a message, and hints.

use std::fmt;
use std::process::ExitCode;

use crate::terminal::{shown, tell_in_any_case};

/// Why a command failed, as the exit code tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    /// The command line asks for something that cannot be: exit code 2.
    Usage,
    /// The command was right but its work failed: exit code 1.
    Failure,
}

/// An error on its way to the user: what was wrong, and what to do about it.
#[derive(Debug)]
pub(crate) struct CommandError {
    kind: ErrorKind,
    error: anyhow::Error,
    hints: Vec<String>,
}

impl CommandError {
    /// Makes an error about the command line itself.
    pub(crate) fn usage(error: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Usage, anyhow::anyhow!("{error}"))
    }

    /// Makes an error about work that failed.
    pub(crate) fn failure(error: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Failure, anyhow::anyhow!("{error}"))
    }

    fn new(kind: ErrorKind, error: anyhow::Error) -> Self {
        Self {
            kind,
            error,
            hints: Vec::new(),
        }
    }

    /// Adds one thing that the user can do.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// Writes the error and its hints to stderr. Names in them may be those of anyone's files.
    pub(crate) fn report(&self) {
        tell_in_any_case(&shown(&self.to_string()));
    }

    /// The exit code that tells this error's kind.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self.kind {
            ErrorKind::Usage => ExitCode::from(2),
            ErrorKind::Failure => ExitCode::from(1),
        }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "error: {:#}", self.error)?;
        self.hints
            .iter()
            .try_for_each(|hint| writeln!(formatter, "hint: {hint}"))
    }
}
