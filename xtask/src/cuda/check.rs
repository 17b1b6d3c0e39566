//! `cargo xtask cuda-check`: the features `cuda` and `nccl` are checked on a machine that has no CUDA at all.
//!
//! A stand-in for the toolkit serves the build scripts, so everything is type-checked and linted, and programs link and
//! start. Kernels are empty: what is built here must never be taken for what runs on a GPU, hence a target folder apart.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use xshell::{Shell, cmd};

use super::toolkit::{TARGET, Toolkit};

/// The folder that all of this is built in, in the workspace's target folder.
const FOLDER: &str = "target/cuda-check";

/// Dependencies of build scripts would be optimised as tests' are, for minutes.
const QUICK: &str = "profile.dev.package.\"*\".opt-level=0";

/// What such a build can show without a GPU: NCCL's protocol over a stand-in for NCCL, and how a GPU is refused, by the
/// library and by the `sconce` of that build, which starts and says what is missing.
const TESTS: [&str; 5] = ["--lib", "--test", "device", "--test", "env"];

/// What runs over a stand-in for the driver: unified memory, and training whose parameters are on a device.
const TESTS_WITH_DRIVER: [&str; 4] = ["--test", "unified_memory", "--test", "on_cuda"];

/// The stand-in for the driver, and for libraries that candle opens a device with.
const DRIVER: &str = include_str!("driver.c");
/// What makes the engine's kernels functions of the CPU for it, and where they are.
const KERNELS_ON_CPU: &str = include_str!("kernels_on_cpu.cpp");
const KERNELS: &str = "crates/zero/src/device/kernels.cu";
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
        let driver = lay_driver(shell, root, &folder.join("driver"))?;
        let test = cmd!(shell, "cargo test {flags...} {folder} {TESTS_WITH_DRIVER...}");
        let test = toolkit.serve(test).env("LD_LIBRARY_PATH", &driver).quiet();
        test.run()?;
        // Once more, without memory that host and device reach at one time.
        let test = cmd!(shell, "cargo test {flags...} {folder} --test on_cuda every_way");
        let test = toolkit.serve(test).env("LD_LIBRARY_PATH", driver).quiet();
        test.env("STAND_IN_KEEPS_MEMORY_APART", "1").run()?;
    }
    Ok(())
}

/// Compiles the stand-in for the driver into a folder, where programs find it by its libraries' names.
fn lay_driver(shell: &Shell, root: &Path, folder: &Path) -> Result<PathBuf> {
    shell.create_dir(folder)?;
    let (kernels, driver) = (folder.join("kernels.o"), folder.join("driver.o"));
    let flags = "-O1 -fPIC -Wall -Wextra -Werror -pthread -c".split(' ');
    // No fused operations: the results are to be those of the engine's loops.
    let cxx = "-x c++ - -std=c++17 -ffp-contract=off -fno-math-errno -Wno-unused-parameter".split(' ');
    let compile = cmd!(shell, "gcc {cxx...}").args(flags.clone()).arg("-o").arg(&kernels);
    let source = kernels_on_cpu(&shell.read_file(root.join(KERNELS))?);
    let compiled = compile.stdin(source).quiet().run();
    compiled.context("compiling the engine's kernels for the CPU; gcc must know C++")?;
    let compile = cmd!(shell, "gcc -x c -").args(flags).arg("-o").arg(&driver);
    compile.stdin(DRIVER).quiet().run()?;
    for library in LIBRARIES {
        let file = folder.join(format!("lib{library}.so"));
        cmd!(shell, "gcc -shared -pthread -o {file} {driver} {kernels}")
            .quiet()
            .run()?;
    }
    Ok(folder.to_owned())
}

/// Returns kernels as a program of the CPU's, with a table of their names.
fn kernels_on_cpu(kernels: &str) -> String {
    let names = kernels.lines().filter_map(|line| {
        let rest = line.strip_prefix("KERNEL ").or_else(|| line.strip_prefix("STEP("))?;
        rest.split(['(', ',']).next()
    });
    let table: String = names.map(|name| format!("REGISTER({name}) ")).collect();
    format!(
        "{KERNELS_ON_CPU}\n{kernels}\nextern \"C\" const Kernel kernels[];\nconst Kernel kernels[] = {{{table}END}};\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_in_the_table() {
        let kernels = "#define KERNEL extern\n#define STEP(name, F) \\\n    KERNEL name(F f)\nKERNEL a(int b) {}\nSTEP(c, d) {}\n";
        assert!(kernels_on_cpu(kernels).ends_with("kernels[] = {REGISTER(a) REGISTER(c) END};\n"));
    }
}
