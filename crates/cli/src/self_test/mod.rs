//! `sconce test`: whether training works here, on the configured world.
//!
//! The ranks run `sconce_core::self_test`, started as any program is; so the test goes through all that a run does.

mod rank;

use std::process::ExitCode;

use clap::Args;
use sconce_core::self_test::{CheckOutcome, checks};
use serde_json::json;

use crate::aligned_table::aligned_table;
use crate::command_error::CommandError;
use crate::own_ranks::WorldArguments;
use crate::terminal::print;
pub(crate) use rank::{RankArguments, run as run_rank};

/// Start the self-test on the configured world, and print a table of checks
///
/// Every rank runs: process order, splitting, random state, data loaders, collectives, training, ZeRO 1 to 3 and FSDP
/// against plain candle, 16 bits, checkpoints. Exit code 1 if a check fails, and its name and numbers.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Arguments {
    #[command(flatten)]
    world: WorldArguments,

    /// Write one JSON object in the place of a table
    #[arg(long)]
    json: bool,
}

/// Runs `sconce test`. Must be called on the main thread.
///
/// # Errors
/// When nothing could be started.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let (ended, outcomes): (_, Vec<CheckOutcome>) = arguments.world.run(rank::NAME, [])?;
    let unfinished = checks().get(outcomes.len()).map(|check| check.name);
    let any_failed = outcomes.iter().any(|outcome| outcome.failure.is_some());
    let passed = !any_failed && unfinished.is_none() && ended == ExitCode::SUCCESS;
    print(&if arguments.json {
        let object = json!({ "passed": passed, "checks": outcomes, "ended_in": unfinished });
        format!("{object:#}\n")
    } else {
        text(&outcomes, unfinished)
    })?;
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn text(outcomes: &[CheckOutcome], unfinished: Option<&str>) -> String {
    let row = |outcome: &CheckOutcome| {
        let failed = outcome.failure.is_some();
        vec![
            outcome.name.clone(),
            if failed { "FAILED" } else { "passed" }.to_owned(),
            format!("{:.0} ms", outcome.seconds * 1e3),
            if failed {
                outcome.rule.clone()
            } else {
                outcome.detail.clone()
            },
        ]
    };
    let rows = Vec::from_iter(outcomes.iter().map(row));
    let mut text = aligned_table(
        &["check", "result", "time", "found"],
        &["check", "result", "found"],
        &rows,
    );
    let failed = outcomes
        .iter()
        .filter_map(|outcome| Some((outcome, outcome.failure.as_ref()?)));
    let failed = Vec::from_iter(failed);
    for (outcome, failure) in &failed {
        text += &format!("\nfailed: {}: {failure}\n", outcome.name);
    }
    text += &match (unfinished, failed.len()) {
        (Some(name), _) => format!("\nthe ranks ended in the check {name:?}\n"),
        (None, 0) => format!("\nall {} checks passed: training works here\n", outcomes.len()),
        (None, count) => format!("\n{count} of {} checks failed\n", outcomes.len()),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(name: &str, failure: Option<&str>) -> CheckOutcome {
        CheckOutcome {
            name: name.into(),
            rule: "sums are sums".into(),
            detail: "4 ranks".into(),
            failure: failure.map(str::to_owned),
            seconds: 0.0125,
        }
    }

    #[test]
    fn a_failed_check_is_named_with_its_numbers() {
        let outcomes = [
            outcome("state", None),
            outcome("all-reduce", Some("rank 1: found 2, expected 3")),
        ];
        let shown = text(&outcomes, None);
        for words in [
            "passed",
            "FAILED",
            "12 ms",
            "failed: all-reduce: rank 1: found 2, expected 3",
            "1 of 2 checks failed",
        ] {
            assert!(shown.contains(words), "{words} in\n{shown}");
        }
    }

    #[test]
    fn a_group_that_is_lost_names_the_check_in_which_it_ended() {
        let shown = text(&[outcome("state", None)], Some("process order"));
        assert!(
            shown.contains("the ranks ended in the check \"process order\""),
            "{shown}"
        );
    }
}
