//! One rank of `sconce test`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use sconce_core::AcceleratorBuilder;
use sconce_core::self_test::{CheckOutcome, SelfTest, checks};

use crate::command_error::CommandError;
use crate::own_ranks::tell_result;

/// The subcommand's name.
pub(super) const NAME: &str = "self-test-rank";

/// What a rank is told.
#[derive(Debug, Args)]
pub(crate) struct RankArguments {
    /// File to which rank 0 adds outcomes.
    results: PathBuf,
}

/// Runs all checks on this rank.
///
/// # Errors
/// When the ranks cannot meet, the group is lost, or outcomes cannot be told.
pub(crate) fn run(arguments: &RankArguments) -> Result<ExitCode, CommandError> {
    let acc = AcceleratorBuilder::default().build().map_err(CommandError::failure)?;
    let mut told = Ok(());
    let mut tell = |outcome: &CheckOutcome| {
        if acc.is_main_process() && told.is_ok() {
            told = tell_result(&arguments.results, outcome);
        }
    };
    // Failed checks are told by the table, and are no failure of this process.
    SelfTest::new(&*acc)
        .run(checks(), &mut tell)
        .map_err(CommandError::failure)?;
    told.map(|()| ExitCode::SUCCESS)
}
