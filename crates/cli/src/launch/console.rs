//! The launcher's stdout and stderr, as the ranks share them: whole lines, each with its rank in front.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

use crate::terminal::wants_colour;

/// Colours of the prefixes (cyan, green, yellow, magenta, blue, red), taken in turn by rank.
const COLOURS: [u8; 6] = [36, 32, 33, 35, 34, 31];
/// Clears what a longer, earlier state of a progress bar left on the line.
const CLEAR_LINE: &[u8] = b"\x1b[K";

/// One of the two output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    Stdout,
    Stderr,
}

impl fmt::Display for Stream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        })
    }
}

/// Both output streams behind one lock: lines stay whole even where both lead to the same file.
#[derive(Debug)]
pub(super) struct Console {
    prefix: bool,
    stdout: Style,
    stderr: Style,
    written: Mutex<Written>,
}

/// What the console must know of what was written so far.
#[derive(Debug, Default)]
struct Written {
    /// Whether it ended in `\r`: then the next line begins on top of it.
    after_carriage_return: bool,
    /// The first failure, other than that of a reader who has left.
    failure: Option<(Stream, io::Error)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Style {
    terminal: bool,
    colour: bool,
}

impl Style {
    fn of(stream: &impl IsTerminal) -> Self {
        Self {
            terminal: stream.is_terminal(),
            colour: wants_colour(stream),
        }
    }
}

impl Console {
    /// Makes the console of this process. Without `prefix`, lines are passed on as they are.
    pub(super) fn new(prefix: bool) -> Self {
        Self {
            prefix,
            stdout: Style::of(&io::stdout()),
            stderr: Style::of(&io::stderr()),
            written: Mutex::default(),
        }
    }

    /// The text before each of `rank`'s lines in `stream`.
    pub(super) fn prefix(&self, rank: usize, stream: Stream) -> Vec<u8> {
        match (self.prefix, self.style(stream).colour) {
            (false, _) => Vec::new(),
            (true, false) => format!("[rank {rank}] ").into_bytes(),
            (true, true) => format!("\x1b[{}m[rank {rank}]\x1b[0m ", COLOURS[rank % COLOURS.len()]).into_bytes(),
        }
    }

    /// Writes `lines`, whole lines that already carry their prefixes, without anything in between.
    ///
    /// # Errors
    /// When the stream cannot be written to, for one because its reader has gone.
    pub(super) fn write(&self, stream: Stream, lines: &[u8]) -> io::Result<()> {
        let Some(last) = lines.last() else { return Ok(()) };
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let overwrites = written.after_carriage_return && self.style(stream).terminal;
        let clear: &[u8] = if overwrites { CLEAR_LINE } else { b"" };
        written.after_carriage_return = *last == b'\r';
        let result = match stream {
            Stream::Stdout => write_all(io::stdout().lock(), clear, lines),
            Stream::Stderr => write_all(io::stderr().lock(), clear, lines),
        };
        result.map_err(|error| {
            let kind = error.kind();
            if kind != io::ErrorKind::BrokenPipe {
                written.failure.get_or_insert((stream, error));
            }
            kind.into()
        })
    }

    /// The first failure to write, other than that a reader has left, and the stream that it came from.
    pub(super) fn take_failure(&self) -> Option<(Stream, io::Error)> {
        self.written
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .failure
            .take()
    }

    fn style(&self, stream: Stream) -> Style {
        match stream {
            Stream::Stdout => self.stdout,
            Stream::Stderr => self.stderr,
        }
    }
}

fn write_all(mut sink: impl Write, clear: &[u8], lines: &[u8]) -> io::Result<()> {
    sink.write_all(clear)?;
    sink.write_all(lines)?;
    sink.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn console(prefix: bool, colour: bool) -> Console {
        let style = Style {
            terminal: colour,
            colour,
        };
        Console {
            prefix,
            stdout: style,
            stderr: style,
            written: Mutex::default(),
        }
    }

    #[test]
    fn the_prefix_is_coloured_only_where_colour_is_wanted() {
        assert_eq!(console(true, false).prefix(12, Stream::Stdout), b"[rank 12] ");
        assert_eq!(
            console(true, true).prefix(1, Stream::Stderr),
            b"\x1b[32m[rank 1]\x1b[0m "
        );
        assert_eq!(console(false, true).prefix(1, Stream::Stdout), b"");
    }
}
