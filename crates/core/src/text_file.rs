//! Files of text that people write: small, and read as a whole.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Why a file is not read.
#[derive(Debug)]
pub(crate) enum Unread {
    /// It cannot be read, or is no text.
    Unreadable(io::Error),
    /// It has more bytes than such a file ever has.
    TooLarge,
}

/// Reads a file of at most `most` bytes.
pub(crate) fn read_text(file: &Path, most: u64) -> Result<String, Unread> {
    let mut bytes = Vec::new();
    let opened = File::open(file).map_err(Unread::Unreadable)?;
    let mut limited = opened.take(most + 1);
    limited.read_to_end(&mut bytes).map_err(Unread::Unreadable)?;
    if bytes.len() as u64 > most {
        return Err(Unread::TooLarge);
    }
    String::from_utf8(bytes).map_err(|error| Unread::Unreadable(io::Error::other(error)))
}
