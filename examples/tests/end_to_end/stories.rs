//! The small programs run on any number of ranks, and learn.

use crate::{example, sconce, text};
use std::process::Command;

/// Runs an example and returns the losses that it prints.
fn losses(name: &str, ranks: usize) -> Vec<f64> {
    let mut command = Command::new(sconce());
    command
        .args(["launch", "--num_processes", &ranks.to_string()])
        .arg(example(name));
    let output = command.output().expect("sconce runs");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let lines = text(&output.stdout);
    let loss = |line: &str| {
        line.split_once("loss ")
            .map(|(_, loss)| loss.trim().parse().expect("a number"))
    };
    lines.lines().filter_map(loss).collect()
}

#[test]
fn quickstart_learns_on_any_number_of_ranks() {
    for ranks in [1, 2, 3] {
        let losses = losses("quickstart", ranks);
        assert!(
            losses.len() > 3 && losses[losses.len() - 1] < 0.5 * losses[0],
            "{ranks} ranks: {losses:?}"
        );
    }
}

#[test]
fn a_custom_strategy_trains_to_the_numbers_of_data_parallelism() {
    for ranks in [1, 2, 3] {
        let losses = losses("custom_strategy", ranks);
        let (parallel, mixed) = losses.split_at(losses.len() / 2);
        assert!(
            parallel.len() == 5 && parallel[4] < 0.5 * parallel[0],
            "{ranks} ranks: {losses:?}"
        );
        assert_eq!(parallel, mixed, "{ranks} ranks");
    }
}
