//! Where checkpoints are: written apart, published by a rename, found again, and pruned.
//!
//! | name in the folder | is |
//! | --- | --- |
//! | `checkpoint_N` | a complete checkpoint: it got this name when everything in it was on disk |
//! | `.checkpoint_N.partial` | one being written, or what is left of one |
//! | `.checkpoint_N.old` | one being deleted |
//! | `.lock` | locked by the run that keeps its checkpoints here ([`folder_lock`](super::folder_lock)) |
//! | `latest` | the name of the newest, for people and scripts; nothing here trusts it |

use super::error::CheckpointError;
use super::index::Index;
use sconce_zero::ForeignWeights;
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

const PREFIX: &str = "checkpoint_";

/// A folder that is to become a checkpoint.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) path: PathBuf,
    pub(super) target: PathBuf,
    /// Whether it goes with this: on the rank that answers for the folder, until it has its name.
    is_to_be_removed: bool,
}

impl Draft {
    /// Makes the folder into which the checkpoint to be called `target` is written; what another attempt left is removed.
    pub(super) fn begin(target: PathBuf) -> Result<Self, CheckpointError> {
        Ok(Self {
            path: begin(&target)?,
            target,
            is_to_be_removed: true,
        })
    }

    /// Names the folder on a rank that does not answer for it.
    pub(super) fn of_others(target: PathBuf) -> Self {
        Self {
            path: partial(&target),
            target,
            is_to_be_removed: false,
        }
    }

    /// Gives the folder its name, when all of it is on disk.
    pub(super) fn publish(&mut self) -> Result<(), CheckpointError> {
        sync_all(&self.path)?;
        publish(&self.path, &self.target)?;
        self.is_to_be_removed = false;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if self.is_to_be_removed {
            // A disk may be full because of it. The failure that is told is the first.
            let _ = remove(&self.path);
        }
    }
}

fn begin(target: &Path) -> Result<PathBuf, CheckpointError> {
    if target.exists() {
        let reason = "it exists already; a checkpoint is never overwritten: name another folder, or remove it";
        return Err(CheckpointError::unusable(target, reason));
    }
    let partial = partial(target);
    remove(&partial)?;
    let parent = parent(target);
    fs::create_dir_all(parent).map_err(|error| CheckpointError::unusable(parent, error))?;
    fs::create_dir(&partial).map_err(|error| CheckpointError::unusable(&partial, error))?;
    Ok(partial)
}

/// Makes the folder of numbered checkpoints if need be, and finds out whether something can be written there.
pub(crate) fn check_writable(folder: &Path) -> Result<(), CheckpointError> {
    let probe = folder.join(".writable");
    let written = fs::create_dir_all(folder)
        .and_then(|()| File::create(&probe))
        .and_then(|_| fs::remove_file(&probe));
    written.map_err(|error| {
        let reason = format!("checkpoints cannot be written here ({error}); name a folder that can be written");
        CheckpointError::unusable(folder, reason)
    })
}

/// Returns where the checkpoint to be called `target` is written.
fn partial(target: &Path) -> PathBuf {
    beside(target, "partial")
}

/// Writes a small file, which is on disk when this returns.
pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let written = File::create(path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|error| CheckpointError::unusable(path, error))
}

/// Returns when all that lies in a folder is on disk: also what hooks wrote, who may have left it to the system.
fn sync_all(folder: &Path) -> Result<(), CheckpointError> {
    let refuse = |error| CheckpointError::unusable(folder, error);
    for entry in fs::read_dir(folder).map_err(refuse)? {
        let entry = entry.map_err(refuse)?;
        let (path, kind) = (entry.path(), entry.file_type().map_err(refuse)?);
        if kind.is_dir() {
            sync_all(&path)?;
        } else if kind.is_file() {
            let synced = File::open(&path).and_then(|file| file.sync_all());
            synced.map_err(|error| CheckpointError::unusable(&path, error))?;
        }
    }
    sync_folder(folder)
}

/// Gives a checkpoint, all of whose files are on disk, its name.
fn publish(partial: &Path, target: &Path) -> Result<(), CheckpointError> {
    fs::rename(partial, target).map_err(|error| CheckpointError::unusable(target, error))?;
    let parent = parent(target);
    sync_folder(parent)?;
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let latest = parent.join("latest");
    let draft = parent.join(".latest.partial");
    write_file(&draft, name.as_bytes())?;
    fs::rename(&draft, &latest).map_err(|error| CheckpointError::unusable(&latest, error))?;
    sync_folder(parent)
}

/// Returns the numbers of the checkpoints in a folder, whole or not, ascending.
pub(super) fn numbers(folder: &Path) -> Result<Vec<u64>, CheckpointError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(CheckpointError::unusable(folder, error)),
    };
    let mut numbers = Vec::new();
    for entry in entries {
        let name = entry
            .map_err(|error| CheckpointError::unusable(folder, error))?
            .file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX))
            .and_then(|number| number.parse::<u64>().ok());
        numbers.extend(number);
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Returns where checkpoint `number` of a folder is.
pub(super) fn numbered(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{PREFIX}{number}"))
}

/// Returns the checkpoint that `folder` is, or the newest complete one in it, and why newer ones are none.
pub(super) fn locate(folder: &Path) -> Result<(PathBuf, Index, Vec<String>), CheckpointError> {
    if folder.join("index.json").exists() {
        return Ok((folder.to_owned(), Index::read(folder)?, Vec::new()));
    }
    if folder.is_dir() && !numbers(folder)?.is_empty() {
        return newest(folder);
    }
    match ForeignWeights::find(folder) {
        Some(foreign) => Err(CheckpointError::Foreign { foreign }),
        None if folder.is_dir() => newest(folder),
        None => Ok((folder.to_owned(), Index::read(folder)?, Vec::new())),
    }
}

/// Returns the newest complete checkpoint of a folder, and why newer ones are none.
fn newest(folder: &Path) -> Result<(PathBuf, Index, Vec<String>), CheckpointError> {
    let mut skipped = Vec::new();
    for number in numbers(folder)?.into_iter().rev() {
        let path = numbered(folder, number);
        match Index::read(&path) {
            Ok(index) => return Ok((path, index, skipped)),
            Err(error) => skipped.push(error.to_string()),
        }
    }
    Err(CheckpointError::NoneComplete {
        folder: folder.into(),
        skipped,
    })
}

/// Deletes the oldest checkpoints of a folder until `limit` are left.
pub(super) fn prune(folder: &Path, limit: usize) -> Result<(), CheckpointError> {
    let numbers = numbers(folder)?;
    let too_many = numbers.len().saturating_sub(limit.max(1));
    for number in &numbers[..too_many] {
        let (path, old) = (numbered(folder, *number), beside(&numbered(folder, *number), "old"));
        remove(&old)?;
        // Never half deleted under a name that a reader takes for a checkpoint.
        fs::rename(&path, &old).map_err(|error| CheckpointError::unusable(&path, error))?;
        remove(&old)?;
    }
    Ok(())
}

/// Returns the hidden name beside a checkpoint's.
fn beside(target: &Path, state: &str) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    parent(target).join(format!(".{name}.{state}"))
}

fn parent(target: &Path) -> &Path {
    match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Removes a folder, if there is one.
pub(super) fn remove(folder: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(CheckpointError::unusable(folder, error)),
        _ => Ok(()),
    }
}

fn sync_folder(folder: &Path) -> Result<(), CheckpointError> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| CheckpointError::unusable(folder, error))
}
