//! A file of lines that a run adds to, also where an earlier run was killed in the middle of one; and files written at once.

use super::TrackerError;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// An open file whose every line is whole.
#[derive(Debug)]
pub(super) struct AppendFile {
    path: PathBuf,
    file: File,
}

impl AppendFile {
    /// Opens or makes a file, and the folders above it. A last line without an end, which only a crash leaves, is cut off.
    pub(super) fn open(path: PathBuf) -> Result<Self, TrackerError> {
        make_folder_of(&path)?;
        let open = || {
            let file = OpenOptions::new().append(true).create(true).open(&path)?;
            if file.metadata()?.len() > 0 {
                let bytes = fs::read(&path)?;
                let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                if whole < bytes.len() {
                    file.set_len(whole as u64)?;
                }
            }
            Ok(file)
        };
        let file = open().map_err(TrackerError::at(&path))?;
        Ok(Self { path, file })
    }

    /// Says whether it has no line yet.
    pub(super) fn is_empty(&self) -> Result<bool, TrackerError> {
        let facts = self.file.metadata().map_err(TrackerError::at(&self.path))?;
        Ok(facts.len() == 0)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds text that ends a line, in one call of the system: it survives the end of this process.
    pub(super) fn write(&mut self, lines: &str) -> Result<(), TrackerError> {
        let written = self.file.write_all(lines.as_bytes());
        written.map_err(TrackerError::at(&self.path))
    }
}

/// Writes a whole file, and makes the folders above it.
pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), TrackerError> {
    make_folder_of(path)?;
    fs::write(path, bytes).map_err(TrackerError::at(path))
}

fn make_folder_of(path: &Path) -> Result<(), TrackerError> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).map_err(TrackerError::at(folder))
}

/// Puts a file in the place of another, so that a reader finds the old or the new one.
pub(super) fn replace(path: &Path, text: &str) -> Result<(), TrackerError> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    fs::write(&beside, text).map_err(TrackerError::at(&beside))?;
    fs::rename(&beside, path).map_err(TrackerError::at(path))
}
