//! `cargo xtask ci`: the checks that every change must pass, cheapest first.
//!
//! All steps share one target folder and one set of features, so every dependency is checked once and built once.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use xshell::{Shell, cmd};

use crate::book;
use crate::cuda;
use crate::launch_faults;
use crate::mpi_hosts;
use crate::namespaces;
use crate::test_totals::{TestTotals, run_tests};
use crate::tidy;

/// The command that runs all tests; the README names the same (`tidy` checks that).
pub(crate) const TEST_COMMAND: &str = "cargo test --workspace";

/// The command that runs the tests over MPI, which [`TEST_COMMAND`] skips.
const MPI_TEST_COMMAND: &str =
    "cargo test --workspace --features mpi --test conformance --test mpi_jobs --test end_to_end over_mpi";

/// Runs every check. The last line on stdout is the tests' totals, as `N passed, N failed, N skipped`.
///
/// # Errors
/// At the first step that fails, with its name.
pub(crate) fn run(shell: &Shell, root: &Path) -> Result<()> {
    let started = Instant::now();
    step("format", || Ok(cmd!(shell, "cargo fmt --all --check").quiet().run()?))?;
    step("tidy", || tidy::run(shell, root))?;
    step("clippy", || {
        let clippy = cmd!(shell, "cargo clippy --workspace --all-targets -- --deny warnings");
        Ok(clippy.quiet().run()?)
    })?;
    step("documentation", || {
        let doc = cmd!(shell, "cargo doc --workspace --no-deps").env("RUSTDOCFLAGS", "--deny warnings");
        Ok(doc.quiet().run()?)
    })?;
    if book::can_run(shell) {
        step("book", || book::run(shell, root))?;
    } else {
        println!("ci: no mdbook in PATH: the book is not built");
    }
    let mut totals = step("tests", || test(TEST_COMMAND, root, TestTotals::default()))?;
    let can_make_hosts = namespaces::can_be_made(shell);
    let on_hosts = |name, work: fn(&Shell, &Path) -> Result<TestTotals>| match &can_make_hosts {
        Ok(()) => step(name, || work(shell, root)),
        Err(reason) => {
            println!("ci: {reason}: skipped: {name}");
            Ok(TestTotals {
                skipped: 1,
                ..TestTotals::default()
            })
        }
    };
    totals += on_hosts("faults of a run over three hosts", launch_faults::run)?;
    if has_mpi(shell) {
        step("clippy over MPI", || {
            let clippy = "clippy --workspace --all-targets --features mpi -- --deny warnings";
            let clippy = clippy.split(' ');
            Ok(cmd!(shell, "cargo {clippy...}").quiet().run()?)
        })?;
        totals = step("tests over MPI", || test(MPI_TEST_COMMAND, root, totals))?;
        totals += on_hosts("MPI on two hosts", mpi_hosts::run)?;
    } else {
        println!("ci: no mpicc and mpirun in PATH: the tests over MPI stay skipped");
    }
    if cuda::check::can_run(shell) {
        step("clippy for GPUs", || cuda::check::run(shell, root, false))?;
    } else {
        println!("ci: no gcc in PATH, or another machine than x86-64 Linux: what concerns GPUs is not checked");
    }
    println!("ci: all steps passed in {}", seconds(started.elapsed()));
    println!("{totals}");
    Ok(())
}

/// Runs tests that `before` counts as skipped, or that it does not count; returns the totals of all.
fn test(command: &str, root: &Path, before: TestTotals) -> Result<TestTotals> {
    let (mut totals, status) = run_tests(command, root)?;
    let ran = totals.passed + totals.failed;
    totals += TestTotals {
        skipped: before.skipped.saturating_sub(ran),
        ..before
    };
    if !status.success() || totals.failed > 0 {
        println!("{totals}");
        bail!("`{command}`: {status}");
    }
    Ok(totals)
}

/// Whether programs can be built for MPI and started.
fn has_mpi(shell: &Shell) -> bool {
    let answers = |program: &str| {
        cmd!(shell, "{program} --version")
            .quiet()
            .ignore_stderr()
            .read()
            .is_ok()
    };
    answers("mpicc") && answers("mpirun")
}

fn step<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    println!("ci: {name} ...");
    let started = Instant::now();
    let result = work().with_context(|| format!("ci: step `{name}` failed after {}", seconds(started.elapsed())))?;
    println!("ci: {name} passed in {}", seconds(started.elapsed()));
    Ok(result)
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}
