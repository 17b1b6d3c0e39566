//! Sconce's own automation: what CI runs, what you run before you stop, and nothing else.
//!
//! Started by `cargo xtask` (an alias in `.cargo/config.toml`), so no tool has to be installed. It depends on none of
//! the crates that it checks and not on candle, so it is built within seconds and runs where they do not compile.

#![forbid(unsafe_code)]

mod bench;
mod ci;
mod cuda;
mod launch_faults;
mod mpi_hosts;
mod namespaces;
mod test_totals;
mod tidy;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use xshell::Shell;

/// Sconce's own automation.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run every check: format, tidy, clippy, documentation, tests. Stops at the first that fails.
    Ci,
    /// Check the rules of the house that no other tool checks.
    Tidy,
    /// Lint the features cuda and nccl with a stand-in for the CUDA toolkit; needs gcc, and no CUDA.
    CudaCheck {
        /// Also run the tests of such a build that need no GPU
        #[arg(long)]
        and_tests: bool,
    },
    /// Build what is checked on a GPU into one folder, with a script that runs it there; needs gcc, python3 and pip.
    GpuCheck,
    /// Run jobs over MPI on two hosts, which are network namespaces; needs root, iproute2 and Open MPI.
    MpiHosts,
    /// Kill ranks and launchers of a run over three hosts, which are network namespaces; needs root and iproute2.
    LaunchFaults,
    /// Measure in release mode; prints one JSON object per line.
    Bench {
        /// What to measure
        suite: bench::Suite,
        /// Arguments of the bench program
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().collect();
    let result = if cuda::nvcc::is_called(words.first()) {
        cuda::nvcc::run(&words[1..])
    } else {
        run(Arguments::parse_from(words).task)
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<()> {
    let root = root()?;
    let shell = Shell::new()?;
    shell.change_dir(&root);
    match task {
        Task::Ci => ci::run(&shell, &root),
        Task::Tidy => tidy::run(&shell, &root),
        Task::CudaCheck { and_tests } => cuda::check::run(&shell, &root, and_tests),
        Task::GpuCheck => cuda::gpu::run(&shell, &root),
        Task::MpiHosts => mpi_hosts::run(&shell, &root).map(|totals| println!("{totals}")),
        Task::LaunchFaults => launch_faults::run(&shell, &root).map(|totals| println!("{totals}")),
        Task::Bench { suite, arguments } => bench::run(&shell, suite, &arguments),
    }
}

/// The root of the workspace, whatever folder of it `cargo xtask` is called in.
fn root() -> Result<PathBuf> {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .context("CARGO_MANIFEST_DIR is not set: start this program by `cargo xtask`")?;
    let root = Path::new(&manifest).parent();
    Ok(root.context("the package xtask lies in the workspace")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_definition_is_consistent() {
        use clap::CommandFactory as _;
        Arguments::command().debug_assert();
    }

    #[test]
    fn arguments_of_a_bench_program_need_no_separator() {
        let words = ["cargo xtask", "bench", "train", "--steps", "3"];
        let Task::Bench { suite, arguments } = Arguments::try_parse_from(words).unwrap().task else {
            panic!("another task");
        };
        assert_eq!(suite, bench::Suite::Train);
        assert_eq!(arguments, ["--steps", "3"]);
    }
}
