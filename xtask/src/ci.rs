//! `cargo xtask ci`: the checks that every change must pass, cheapest first.
//!
//! All steps share one target folder and one set of features, so every dependency is checked once and built once.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use xshell::{Shell, cmd};

use crate::test_totals::run_tests;
use crate::tidy;

/// The command that runs all tests; the README names the same (`tidy` checks that).
pub(crate) const TEST_COMMAND: &str = "cargo test --workspace";

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
    let totals = step("tests", || {
        let (totals, status) = run_tests(TEST_COMMAND, root)?;
        if !status.success() || totals.failed > 0 {
            println!("{totals}");
            bail!("`{TEST_COMMAND}`: {status}");
        }
        Ok(totals)
    })?;
    println!("ci: all steps passed in {}", seconds(started.elapsed()));
    println!("{totals}");
    Ok(())
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
