//! One run in a folder of numbered checkpoints: two would take each other's numbers, and prune each other's checkpoints.

use super::error::CheckpointError;
use crate::host_name::host_name;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

const NAME: &str = ".lock";
/// How long the end of another run is waited for: a process that was killed has its locks until its memory is freed, and the
/// next run may begin at once.
const PATIENCE: Duration = Duration::from_secs(5);
const BETWEEN_TRIES: Duration = Duration::from_millis(20);
/// Most that is told of who holds the lock.
const MOST_BYTES: u64 = 200;

/// A lock on a folder, until this is dropped or the process ends, however it ends: the system has it, and nothing that a
/// dead process leaves must be removed.
#[derive(Debug)]
pub(crate) struct FolderLock {
    _file: Option<File>,
}

impl FolderLock {
    /// Takes a folder, which exists; a lock that another run has is waited for, for some seconds.
    pub(crate) fn take(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(NAME);
        let refuse = |error| CheckpointError::unusable(&path, error);
        if path.exists() && !path.is_file() {
            return Err(CheckpointError::unusable(&path, "it is not a file; remove it"));
        }
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(refuse)?;
        match lock(&file) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = Vec::new();
                file.take(MOST_BYTES).read_to_end(&mut holder).map_err(refuse)?;
                let holder = String::from_utf8_lossy(&holder).trim().to_owned();
                let reason = format!(
                    "another run keeps its checkpoints here ({holder}); stop that one, or name another folder for this one"
                );
                return Err(CheckpointError::unusable(folder, reason));
            }
            Err(TryLockError::Error(error)) => {
                tracing::warn!(
                    "{} cannot be locked ({error}): another run that keeps checkpoints there would not be noticed",
                    path.display()
                );
                return Ok(Self { _file: None });
            }
        }
        let told = file.set_len(0).and_then(|()| {
            file.rewind()?;
            writeln!(file, "process {} on {}", std::process::id(), host_name())
        });
        told.map_err(refuse)?;
        Ok(Self { _file: Some(file) })
    }
}

/// Locks a file, also where the process that has it is about to be gone.
fn lock(file: &File) -> Result<(), TryLockError> {
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if begun.elapsed() < PATIENCE => std::thread::sleep(BETWEEN_TRIES),
            outcome => return outcome,
        }
    }
}
