//! A folder that appears whole or not at all.

use super::ExportError;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A folder being filled beside its final place, removed again unless it is finished.
#[derive(Debug)]
pub struct NewFolder {
    path: PathBuf,
    target: PathBuf,
    is_finished: bool,
}

impl NewFolder {
    /// Begins a folder that is to become `target`, which must be absent or empty.
    ///
    /// # Errors
    /// [`ExportError::Unusable`] when `target` is anything else, or cannot be written beside.
    pub fn create(target: &Path) -> Result<Self, ExportError> {
        let is_free = match fs::read_dir(target) {
            Ok(mut entries) => entries.next().is_none(),
            Err(error) if error.kind() == ErrorKind::NotFound => true,
            Err(error) => {
                return Err(ExportError::unusable(
                    target,
                    format!("cannot become a model folder: {error}"),
                ));
            }
        };
        if !is_free {
            return Err(ExportError::unusable(
                target,
                "is not empty, expected a new or empty folder to write a model to; remove it or choose another name",
            ));
        }
        // A link cannot be replaced by a rename, and `.` has no name.
        let target = fs::canonicalize(target).unwrap_or_else(|_| target.to_owned());
        let Some(name) = target.file_name() else {
            let reason = "has no name of its own, expected the path of a folder to create";
            return Err(ExportError::unusable(&target, reason));
        };
        let mut unfinished = std::ffi::OsString::from(".");
        unfinished.push(name);
        unfinished.push(format!(".unfinished-{}", std::process::id()));
        let path = target.with_file_name(unfinished);
        let refuse = |path: &Path, error| ExportError::unusable(path, format!("cannot be created: {error}"));
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(|error| refuse(parent, error))?;
        }
        fs::create_dir(&path).map_err(|error| refuse(&path, error))?;
        Ok(Self {
            path,
            target,
            is_finished: false,
        })
    }

    /// Returns where files are put until then.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the folder its name, when all of it is on disk.
    ///
    /// # Errors
    /// [`ExportError::Unusable`] when it cannot be: the message says where what is complete lies.
    pub fn finish(mut self) -> Result<(), ExportError> {
        let synced = || -> std::io::Result<()> {
            for file in fs::read_dir(&self.path)? {
                File::open(file?.path())?.sync_all()?;
            }
            File::open(&self.path)?.sync_all()
        };
        synced().map_err(|error| ExportError::unusable(&self.path, error))?;
        // Whole by now: whatever happens to the rename, it stays.
        self.is_finished = true;
        // Replaces an empty folder, on every Unix; refuses one that has been filled meanwhile.
        fs::rename(&self.path, &self.target).map_err(|error| {
            let target = self.target.display();
            let reason =
                format!("the model is complete here, but cannot be renamed to {target}: {error}; rename it by hand");
            ExportError::unusable(&self.path, reason)
        })
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        if !self.is_finished {
            // Best effort: the error that led here is the one to report.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
