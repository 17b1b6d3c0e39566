//! Files of processes that were killed before they could remove them: some hundred gigabytes after a few such ends.
//!
//! A process holds a lock on each of its files as long as it lives, so a file of this host that can be locked belongs to
//! nobody. Only the one that has just been made and is still empty is not locked yet: empty files stay, and files stay
//! empty until they are locked.

use std::fs::{self, File};
use std::path::Path;

pub(super) const SUFFIX: &str = ".state";

/// Returns what the names of all files begin with that this host's ranks make; then follows the rank.
///
/// The host is in the name because locks need not reach from host to host where they share a folder.
pub(super) fn prefix() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let host: String = host
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '-')
        .collect();
    format!("sconce-{host}-rank")
}

/// Locks an empty file, so that nobody takes it for a leftover; waits while somebody looks at it.
pub(super) fn mark_in_use(file: &File) {
    // Where this fails there are no locks, and nobody can take it for a leftover either.
    let _ = file.lock();
}

/// Removes what killed processes left in `folder`; what cannot be removed stays.
pub(super) fn remove(folder: &Path) {
    let prefix = prefix();
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for path in entries.map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(&prefix)
            && name.ends_with(SUFFIX)
            && let Ok(file) = File::open(&path)
            && file.try_lock().is_ok()
            && file.metadata().is_ok_and(|metadata| metadata.len() > 0)
            && fs::remove_file(&path).is_ok()
        {
            tracing::info!("{}: removed, left by a process that was killed", path.display());
        }
    }
}
