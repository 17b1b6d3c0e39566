//! The whole line, as a user runs it: `sconce launch` starts ranks of `finetune_llama`.

mod bad_input;
mod checkpoints;
mod cogvideox;
mod instructions;
mod killed_rank;
mod over_mpi;
mod parity;
mod precision;
mod stories;
mod trackers;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Once;

/// Returns a program of the workspace, given its path below `target/debug` (or `release`).
///
/// All are built once if need be: cargo builds binaries of other packages, and examples beside a chosen test, only where
/// it is told to. With the whole workspace it chooses the same features for candle as in a run of all tests.
fn program(path: &str) -> PathBuf {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--workspace", "--bins", "--examples"]);
        if cfg!(feature = "mpi") {
            build.args(["--features", "mpi"]);
        }
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        assert!(build.status().expect("cargo runs").success(), "the programs are built");
    });
    target_folder().join(path)
}

fn sconce() -> PathBuf {
    program("sconce")
}

/// Returns the training program.
fn finetune_llama() -> PathBuf {
    example("finetune_llama")
}

fn example(name: &str) -> PathBuf {
    program(&format!("examples/{name}"))
}

/// `target/debug` or `target/release`.
fn target_folder() -> PathBuf {
    let test = std::env::current_exe().expect("this program has a path");
    test.parent()
        .and_then(Path::parent)
        .expect("tests lie in target/PROFILE/deps")
        .into()
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny-llama")
}

/// Runs `finetune_llama` on `ranks` ranks.
fn train(ranks: usize, arguments: &[&str]) -> Output {
    train_with(&[], ranks, arguments)
}

/// Runs `finetune_llama` on `ranks` ranks with more flags for the launcher.
fn train_with(flags: &[&str], ranks: usize, arguments: &[&str]) -> Output {
    let mut command = Command::new(sconce());
    command
        .arg("launch")
        .args(["--num_processes", &ranks.to_string()])
        .args(flags)
        .arg(finetune_llama())
        .args(arguments);
    command.env(
        "SCONCE_FLIGHT_RECORDER",
        std::env::temp_dir().join("sconce-flight-tests"),
    );
    command.output().expect("sconce runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Writes a safetensors file of one tensor `tokens` [steps, batch, sequence].
fn write_tokens(path: &Path, tokens: &candle_core::Tensor) {
    let named = std::collections::HashMap::from([("tokens", tokens.clone())]);
    candle_core::safetensors::save(&named, path).expect("a temporary file can be written");
}
