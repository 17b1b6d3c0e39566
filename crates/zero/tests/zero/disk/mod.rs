//! Training state on disk: it is what it would be in memory, and every way in which disks fail is an error.

mod failures;
mod mount;
mod state;
mod values;

use sconce_zero::DiskOptions;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const BLOCK_BYTES: u64 = 4096;

/// A folder on the disk that the build is on: the system's folder for temporary files may be in memory.
fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn options(folder: &Path, sub_group_elements: usize) -> DiskOptions {
    DiskOptions {
        folder: folder.into(),
        sub_group_elements,
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

/// Different finite numbers.
fn numbers(size: usize, seed: usize) -> Vec<f32> {
    (0..size).map(|i| (i * 7 + seed * 1000) as f32 * 0.125 - 3.0).collect()
}
