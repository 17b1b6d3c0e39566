//! The command line as a whole: the subcommands, and how their results become exit codes.
//!
//! Each subcommand is a module of its own with an `Arguments` type and a `run` function.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{checkpoint, env, launch, merge_weights, report};

/// Distributed training for candle.
#[derive(Debug, Parser)]
#[command(
    name = "sconce",
    version,
    arg_required_else_help = true,
    disable_help_subcommand = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Launch(Box<launch::Arguments>),
    Checkpoint(checkpoint::Arguments),
    MergeWeights(merge_weights::Arguments),
    Env(env::Arguments),
    Report(report::Arguments),
}

/// Parses the arguments of this process, runs the command and reports its error, if any, on stderr.
///
/// Must be called on the main thread. Usage errors end the process with code 2, as clap does.
pub fn run() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Launch(arguments) => launch::run(&arguments),
        Command::Checkpoint(arguments) => checkpoint::run(&arguments),
        Command::MergeWeights(arguments) => merge_weights::run(&arguments),
        Command::Env(arguments) => env::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
    };
    result.unwrap_or_else(|error| {
        error.report();
        error.exit_code()
    })
}
