//! One file of lines for each name that is logged.

use super::TrackerError;
use super::append_file::AppendFile;
use super::name_path::path_of_name;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;

/// Files `NAME.EXTENSION` in a folder, opened when their names first come up.
#[derive(Debug)]
pub(super) struct FilesByName {
    folder: PathBuf,
    /// With its dot; may be empty.
    extension: &'static str,
    open: BTreeMap<PathBuf, AppendFile>,
}

impl FilesByName {
    pub(super) fn new(folder: PathBuf, extension: &'static str) -> Self {
        Self {
            folder,
            extension,
            open: BTreeMap::new(),
        }
    }

    /// Returns the file of a name.
    pub(super) fn file(&mut self, name: &str) -> Result<&mut AppendFile, TrackerError> {
        Ok(match self.open.entry(path_of_name(name)?) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let mut path = self.folder.join(entry.key()).into_os_string();
                path.push(self.extension);
                entry.insert(AppendFile::open(path.into())?)
            }
        })
    }
}
