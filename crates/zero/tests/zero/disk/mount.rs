//! File systems of kinds and sizes that no test machine has by itself; only root can have them.

use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// A mounted file system in memory, unmounted on drop.
pub(super) struct Mount(TempDir);

impl Mount {
    /// Mounts one, or says on stdout that the test is skipped and why.
    pub(super) fn new(kind: &str, options: &str) -> Option<Self> {
        let folder = super::folder();
        let mut mount = Command::new("mount");
        mount.args(["-t", kind, "-o", options, kind]).arg(folder.path());
        let reason = match mount.output() {
            Ok(output) if output.status.success() => return Some(Self(folder)),
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        println!("skipped: {kind} ({options}) cannot be mounted: {reason}");
        None
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // The folder cannot be removed while mounted, and says so on its own.
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}
