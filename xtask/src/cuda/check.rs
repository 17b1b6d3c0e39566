//! `cargo xtask cuda-check`: the features `cuda` and `nccl` are checked on a machine that has no CUDA at all.
//!
//! A stand-in for the toolkit serves the build scripts, so everything is type-checked and linted, and programs link and
//! start. Kernels are empty: what is built here must never be taken for what runs on a GPU, hence a target folder apart.

use std::path::{Path, PathBuf};

use anyhow::Result;
use xshell::{Shell, cmd};

use super::toolkit::{TARGET, Toolkit};

/// The folder that all of this is built in, in the workspace's target folder.
const FOLDER: &str = "target/cuda-check";

/// Dependencies of build scripts would be optimised as tests' are, for minutes.
const QUICK: &str = "profile.dev.package.\"*\".opt-level=0";

/// What such a build can show without a GPU: NCCL's protocol over a stand-in for NCCL, and how a GPU is refused, by the
/// library and by the `sconce` of that build, which starts and says what is missing.
const TESTS: [&str; 5] = ["--lib", "--test", "device", "--test", "env"];

/// What runs over a stand-in for the driver: training whose parameters are on a device.
const TESTS_WITH_DRIVER: [&str; 2] = ["--test", "on_cuda"];

/// The stand-in for the driver, and for libraries that candle opens a device with.
const DRIVER: &str = include_str!("driver.c");
const LIBRARIES: [&str; 3] = ["cuda", "cublas", "curand"];

/// Says whether this machine can run the check.
pub(crate) fn can_run(shell: &Shell) -> bool {
    Toolkit::can_be_laid(shell).is_ok()
}

/// Lints every target of the workspace with the features on; with `and_tests` also builds and runs the tests that need no GPU.
///
/// # Errors
/// When there is no gcc or another machine than x86-64 Linux, or what is checked is not clean.
pub(crate) fn run(shell: &Shell, root: &Path, and_tests: bool) -> Result<()> {
    let folder = root.join(FOLDER);
    let toolkit = Toolkit::lay_stand_in(shell, &folder.join("toolkit"))?;
    let flags = [
        "--config",
        QUICK,
        "--workspace",
        "--features",
        "cuda,nccl",
        "--target",
        TARGET,
        "--target-dir",
    ];
    let lint = cmd!(
        shell,
        "cargo clippy {flags...} {folder} --all-targets -- --deny warnings"
    );
    toolkit.serve(lint).quiet().run()?;
    if and_tests {
        let test = cmd!(shell, "cargo test {flags...} {folder} {TESTS...}");
        toolkit.serve(test).quiet().run()?;
        let driver = lay_driver(shell, &folder.join("driver"))?;
        let test = cmd!(shell, "cargo test {flags...} {folder} {TESTS_WITH_DRIVER...}");
        toolkit.serve(test).env("LD_LIBRARY_PATH", driver).quiet().run()?;
    }
    Ok(())
}

/// Compiles the stand-in for the driver into a folder, where programs find it by its libraries' names.
fn lay_driver(shell: &Shell, folder: &Path) -> Result<PathBuf> {
    shell.create_dir(folder)?;
    for library in LIBRARIES {
        let file = folder.join(format!("lib{library}.so"));
        let compile = cmd!(
            shell,
            "gcc -x c - -O1 -shared -fPIC -Wall -Wextra -Werror -pthread -o {file}"
        );
        compile.stdin(DRIVER).quiet().run()?;
    }
    Ok(folder.to_owned())
}
