//! The lines of text files, one after the other.

use crate::data::DataError;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The longest line that is read, in bytes: a file without line ends shall not fill the memory.
const LONGEST: usize = 64 << 20;

/// A line, and where it stands.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) text: String,
    file: Arc<Path>,
    /// From 1.
    number: usize,
}

impl Line {
    /// Returns an error of this line.
    pub(super) fn error(&self, what: impl std::fmt::Display) -> DataError {
        at(&self.file, self.number, what)
    }
}

fn at(file: &Path, line: usize, what: impl std::fmt::Display) -> DataError {
    format!("{}, line {line}: {what}", file.display()).into()
}

/// Fails if one of the files cannot be opened.
pub(super) fn check(paths: &[PathBuf]) -> Result<(), DataError> {
    paths.iter().try_for_each(|path| open(path).map(drop))
}

fn open(path: &Path) -> Result<BufReader<File>, DataError> {
    let failed = |error| format!("{}: cannot be read: {error}", path.display());
    let file = File::open(path).map_err(failed)?;
    if file.metadata().map_err(failed)?.is_dir() {
        return Err(format!("{}: is a folder; expected a file of lines", path.display()).into());
    }
    Ok(BufReader::new(file))
}

/// Returns the lines of the files, without line ends; a file that breaks off or is no text ends with an error.
pub(super) fn read(paths: Vec<PathBuf>) -> impl Iterator<Item = Result<Line, DataError>> + Send {
    paths.into_iter().flat_map(|path| {
        let (opened, failure) = match open(&path) {
            Ok(reader) => (Some(reader), None),
            Err(error) => (None, Some(Err(error))),
        };
        let of_file = opened
            .into_iter()
            .flat_map(move |reader| lines_of(reader, path.as_path().into()));
        failure.into_iter().chain(of_file)
    })
}

fn lines_of(mut reader: BufReader<File>, file: Arc<Path>) -> impl Iterator<Item = Result<Line, DataError>> + Send {
    let mut number = 0;
    let mut ended = false;
    std::iter::from_fn(move || {
        if ended {
            return None;
        }
        number += 1;
        let mut bytes = Vec::new();
        let longest = LONGEST as u64 + 1;
        match (&mut reader).take(longest).read_until(b'\n', &mut bytes) {
            Ok(0) => return None,
            Ok(_) if bytes.len() > LONGEST => {
                ended = true;
                return Some(Err(at(
                    &file,
                    number,
                    format!("longer than {LONGEST} bytes; expected lines of text"),
                )));
            }
            Ok(_) => {}
            Err(error) => {
                ended = true;
                return Some(Err(at(&file, number, format!("cannot be read: {error}"))));
            }
        }
        if bytes.ends_with(b"\n") {
            bytes.pop();
            if bytes.ends_with(b"\r") {
                bytes.pop();
            }
        }
        let file = Arc::clone(&file);
        Some(match String::from_utf8(bytes) {
            Ok(text) => Ok(Line { text, file, number }),
            Err(error) => {
                let place = error.utf8_error().valid_up_to();
                Err(at(
                    &file,
                    number,
                    format!("no UTF-8 from byte {place} on; expected text"),
                ))
            }
        })
    })
}
