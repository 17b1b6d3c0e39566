//! `sconce env`: what a bug report needs to know of this machine and build.
//!
//! Every fact is looked for on its own, and one that cannot be had says why in its place: the command must work where
//! nothing else does.

mod accelerators;
mod configuration;
mod host;
mod mpi;
mod variables;

use std::process::ExitCode;

use clap::Args;
use serde_json::{Map, Value};

use crate::command_error::CommandError;
use crate::terminal::print;

/// candle's version, which `Cargo.lock` fixes for this program.
pub(crate) const CANDLE: &str = "0.11.1";

/// Say what a bug report needs: versions, features built in, this machine, and variables that are set
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Write one JSON object in the place of lines
    #[arg(long)]
    json: bool,
}

/// What is known, as `key: value`, in the order in which it is told.
#[derive(Debug, Default)]
struct Report {
    facts: Vec<(String, String)>,
    variables: Vec<(&'static str, String)>,
}

/// Runs `sconce env`.
///
/// # Errors
/// When stdout cannot be written to, unless only its reader has left.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let report = Report::collect();
    let text = if arguments.json { report.json() } else { report.lines() };
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

impl Report {
    fn collect() -> Self {
        let mut report = Self::default();
        let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
        report.add("sconce", format!("{} ({profile} build)", env!("CARGO_PKG_VERSION")));
        report.add("features", features());
        report.add("candle", CANDLE);
        host::tell(&mut report);
        accelerators::tell(&mut report);
        mpi::tell(&mut report);
        configuration::tell(&mut report, sconce_collectives::environment::of_process);
        report.variables = variables::that_are_set(|name| std::env::var_os(name));
        report
    }

    fn add(&mut self, key: impl Into<String>, value: impl Into<String>) {
        self.facts.push((key.into(), value.into()));
    }

    /// One `key: value` a line.
    fn lines(&self) -> String {
        let facts = self.facts.iter().map(|(key, value)| (key.as_str(), value));
        let variables = self.variables.iter().map(|(name, value)| (*name, value));
        let lines = facts.chain(variables).map(|(key, value)| {
            let is_end = |character: char| character.is_control();
            format!("{key}: {}\n", value.replace(is_end, " "))
        });
        lines.collect()
    }

    /// One object: the facts, and the variables in an object of their own.
    fn json(&self) -> String {
        let facts = self
            .facts
            .iter()
            .map(|(key, value)| (key.clone(), value.clone().into()));
        let mut object: Map<String, Value> = facts.collect();
        let variables = self.variables.iter();
        let variables: Map<String, Value> = variables
            .map(|(name, value)| ((*name).to_owned(), value.clone().into()))
            .collect();
        object.insert("variables".to_owned(), variables.into());
        format!("{:#}\n", Value::from(object))
    }
}

/// The optional features that this program was built with.
fn features() -> String {
    let all = [
        ("cuda", cfg!(feature = "cuda")),
        ("mpi", cfg!(feature = "mpi")),
        ("nccl", cfg!(feature = "nccl")),
    ];
    let built = all.into_iter().filter(|(_, is_built)| *is_built);
    let names = Vec::from_iter(built.map(|(name, _)| name));
    if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(", ")
    }
}

/// A number of bytes, in GiB.
fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_stays_on_its_line_and_is_whole_in_json() {
        let mut report = Report::default();
        report.add("os", "two\nlines");
        report.variables.push(("RANK", "0".to_owned()));
        assert_eq!(report.lines(), "os: two lines\nRANK: 0\n");
        let json: Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"os": "two\nlines", "variables": {"RANK": "0"}})
        );
    }
}
