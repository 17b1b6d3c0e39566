//! The fuzz targets, compiled and run without libFuzzer: over their seeds, and over what is made of them by cutting,
//! joining and changing bytes. That keeps them true of the code; that nothing panics is for `cargo fuzz` to look for.

use std::fs;
use std::path::{Path, PathBuf};

// Public to the targets.
#[allow(unreachable_pub)]
#[path = "../../../../fuzz/src/lib.rs"]
mod targets;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The contents of all files in `folders`, in the order of their names.
fn seeds(folders: &[&str]) -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for folder in folders {
        let entries = fs::read_dir(repository().join(folder)).unwrap();
        let mut files = Vec::from_iter(entries.map(|entry| entry.unwrap().path()));
        files.sort();
        seeds.extend(files.iter().map(|file| fs::read(file).unwrap()));
    }
    assert!(seeds.len() > 3, "{folders:?} have too few seeds");
    seeds
}

fn run_over(target: fn(&[u8]), folders: &[&str], changes: usize) {
    let seeds = seeds(folders);
    for (index, seed) in seeds.iter().enumerate() {
        target(seed);
        let other = &seeds[(index + 1) % seeds.len()];
        for change in 0..changes {
            let at = change * seed.len() / changes;
            target(&seed[..at]);
            target(&[&seed[..at], &other[other.len() / 2..]].concat());
            let mut changed = seed.clone();
            if let Some(byte) = changed.get_mut(at) {
                *byte ^= 1 << (change % 8);
            }
            target(&changed);
        }
    }
}

#[test]
fn configuration() {
    let fixtures = "crates/core/tests/fixtures";
    let configurations = format!("{fixtures}/configurations");
    let folders = [
        &configurations[..],
        &format!("{fixtures}/deepspeed/valid"),
        "fuzz/seeds/configuration",
    ];
    run_over(targets::configuration::run, &folders, 16);
}

#[test]
fn deepspeed_json() {
    let fixtures = "crates/core/tests/fixtures/deepspeed";
    let folders = [&format!("{fixtures}/valid")[..], &format!("{fixtures}/invalid")];
    run_over(targets::deepspeed_json::run, &folders, 16);
}

#[test]
fn environment() {
    run_over(targets::environment::run, &["fuzz/seeds/environment"], 64);
}

#[test]
fn store_connection() {
    run_over(targets::store_connection::run, &["fuzz/seeds/store_connection"], 4);
}

#[test]
fn store_frames() {
    run_over(targets::store_frames::run, &["fuzz/seeds/store_frames"], 64);
}
