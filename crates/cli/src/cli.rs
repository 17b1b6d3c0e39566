//! The command line as a whole: the subcommands, and how their results become exit codes.
//!
//! Each subcommand is a module of its own with an `Arguments` type and a `run` function.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};

use crate::command_error::CommandError;
use crate::panic_report::reporting_panics;
use crate::{
    bench, checkpoint, completions, config, env, estimate_memory, launch, man, merge_weights, plan, report, self_test,
    to_fsdp2,
};

const CONVENTIONS: &str = "\
Exit codes: 0 done; 1 the work failed, reading a model or a checkpoint included; 2 the command line or a configuration
file is wrong; 101 a bug in sconce.
`sconce launch` ends with the code of the first rank that failed, as its help says.

Results go to stdout, everything else to stderr; there is colour only on a terminal, and none with NO_COLOR set.
A reader of stdout that leaves, as head does, is no failure; ranks learn of it at their next write, as any program.";

/// Distributed training for candle.
#[derive(Debug, Parser)]
#[command(
    name = "sconce",
    version,
    after_help = CONVENTIONS,
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
    Config(config::Arguments),
    ToFsdp2(to_fsdp2::Arguments),
    Checkpoint(checkpoint::Arguments),
    MergeWeights(merge_weights::Arguments),
    EstimateMemory(estimate_memory::Arguments),
    Plan(plan::Arguments),
    Test(self_test::Arguments),
    Bench(bench::Arguments),
    Env(env::Arguments),
    Report(report::Arguments),
    Completions(completions::Arguments),
    Man(man::Arguments),
    #[command(hide = true)]
    SelfTestRank(self_test::RankArguments),
    #[command(hide = true)]
    BenchRank(bench::RankArguments),
}

/// Returns the definition of the command line: what completions and manual pages are made of.
pub(crate) fn definition() -> clap::Command {
    Cli::command()
}

/// Parses the arguments of this process, runs the command and reports its error, if any, on stderr.
///
/// Must be called on the main thread. Usage errors end the process with code 2, as clap does.
pub fn run() -> ExitCode {
    reporting_panics(parse_and_run)
}

fn parse_and_run() -> ExitCode {
    let cli = Cli::try_parse().map_err(|error| launch::refusal(&error).unwrap_or_else(|| error.exit()));
    let result = cli.and_then(|cli| run_command(&cli.command));
    result.unwrap_or_else(|error| {
        error.report();
        error.exit_code()
    })
}

fn run_command(command: &Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::Launch(_) => launch::run_words(&words_of_launch()),
        Command::Config(arguments) => config::run(arguments),
        Command::ToFsdp2(arguments) => to_fsdp2::run(arguments),
        Command::Checkpoint(arguments) => checkpoint::run(arguments),
        Command::MergeWeights(arguments) => merge_weights::run(arguments),
        Command::EstimateMemory(arguments) => estimate_memory::run(arguments),
        Command::Plan(arguments) => plan::run(arguments),
        Command::Test(arguments) => self_test::run(arguments),
        Command::SelfTestRank(arguments) => self_test::run_rank(arguments),
        Command::Bench(arguments) => bench::run(arguments),
        Command::BenchRank(arguments) => bench::run_rank(arguments),
        Command::Env(arguments) => env::run(arguments),
        Command::Report(arguments) => report::run(arguments),
        Command::Completions(arguments) => completions::run(arguments),
        Command::Man(arguments) => man::run(arguments),
    }
}

/// The words of this process's command line after `launch`: configuration files put more in front of them.
fn words_of_launch() -> Vec<OsString> {
    let words = std::env::args_os().skip(1).skip_while(|word| word != "launch");
    words.skip(1).collect()
}
