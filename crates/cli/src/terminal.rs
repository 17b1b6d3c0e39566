//! Text for who sits at the terminal, or reads a pipe in its place.
//!
//! Names in it may come from anyone's files, and must not steer the terminal. A reader may leave at any time, as `head`
//! does: that ends nothing.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::command_error::CommandError;

/// Writes to stdout; a reader that has left is no failure.
///
/// # Errors
/// When stdout cannot be written to for another reason.
pub(crate) fn print(text: &str) -> Result<(), CommandError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        Err(reason) if reason.kind() != io::ErrorKind::BrokenPipe => {
            Err(CommandError::failure(format!("cannot write to stdout: {reason}")))
        }
        _ => Ok(()),
    }
}

/// Whether the user wants to be told of errors of the command line only.
static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Lets [`tell`] write nothing from now on.
pub(crate) fn be_quiet() {
    IS_QUIET.store(true, Ordering::Relaxed);
}

/// Writes to stderr, unless the user wants it quiet. That nobody reads it is no reason to stop.
pub(crate) fn tell(text: &str) {
    if !IS_QUIET.load(Ordering::Relaxed) {
        tell_in_any_case(text);
    }
}

/// Writes to stderr what is why a command does nothing.
pub(crate) fn tell_in_any_case(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

/// Writes a line to stderr about what the user should know and nothing fails of.
pub(crate) fn note(text: &str) {
    tell(&format!("note: {}\n", shown(text)));
}

/// Whether a stream is to have colours: it is a terminal that has them, and nobody minds (<https://no-color.org>).
pub(crate) fn wants_colour(stream: &impl IsTerminal) -> bool {
    stream.is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|value| value != "dumb")
}

/// Returns a text without characters that steer a terminal, but for ends of lines.
pub(crate) fn shown(text: &str) -> String {
    let escaped = |character: char| match character {
        '\n' => "\n".to_owned(),
        _ if character.is_control() => character.escape_default().to_string(),
        _ => character.to_string(),
    };
    text.chars().map(escaped).collect()
}
