//! `cargo xtask bench`: the one way to measure, so that figures are comparable.
//!
//! The bench programs print one JSON object per line on stdout, cargo talks on stderr: `cargo xtask bench train > file`
//! holds nothing but figures.

use std::ffi::OsString;

use anyhow::Result;
use clap::ValueEnum;
use xshell::{Shell, cmd};

/// A bench program of the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Suite {
    /// Saving and loading checkpoints, beside the disk itself.
    Checkpoint,
    /// Collective operations, by size and number of ranks.
    Collectives,
    /// All-reduce over MPI beside MPI's own; builds with the feature `mpi`.
    Mpi,
    /// Optimizer steps with state on disk.
    Offload,
    /// Optimizer steps over flat memory.
    Optimizer,
    /// `sconce --help` and `sconce launch` until they do something; needs python3.
    Startup,
    /// Whole training steps.
    Train,
}

impl Suite {
    /// The bench program; `None` for what is measured from outside.
    fn program(self) -> Option<&'static str> {
        Some(match self {
            Self::Checkpoint => "checkpoint",
            Self::Collectives => "collectives",
            Self::Mpi => "mpi",
            Self::Offload => "offload",
            Self::Optimizer => "optimizer",
            Self::Startup => return None,
            Self::Train => "train",
        })
    }
}

/// Builds the bench program of `suite` in release mode and runs it with `arguments`.
///
/// # Errors
/// When it cannot be built or fails.
pub(crate) fn run(shell: &Shell, suite: Suite, arguments: &[OsString]) -> Result<()> {
    let Some(program) = suite.program() else {
        return startup(shell, arguments);
    };
    // With one package alone cargo would choose other features for candle, and build it once more.
    let features: &[&str] = if suite == Suite::Mpi {
        &["--features", "mpi"]
    } else {
        &[]
    };
    let bench = cmd!(
        shell,
        "cargo bench --workspace {features...} --bench {program} -- {arguments...}"
    );
    Ok(bench.quiet().run()?)
}

/// Builds `sconce` in release mode and measures how long it takes to start.
fn startup(shell: &Shell, arguments: &[OsString]) -> Result<()> {
    cmd!(shell, "cargo build --quiet --release --workspace --bin sconce")
        .quiet()
        .run()?;
    let measure = cmd!(
        shell,
        "python3 xtask/peers/startup.py target/release/sconce {arguments...}"
    );
    Ok(measure.quiet().run()?)
}
