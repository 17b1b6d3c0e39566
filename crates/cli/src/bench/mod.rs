//! `sconce bench`: short measurements of this machine under the configured world.
//!
//! The ranks are this program itself, as in `sconce test`. Figures are medians over rounds; for comparisons between versions
//! there is `cargo xtask bench`, which measures longer.

mod rank;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde_json::json;

use crate::aligned_table::aligned_table;
use crate::byte_size::ByteSize;
use crate::command_error::CommandError;
use crate::own_ranks::{WorldArguments, at_least_one};
use crate::terminal::print;
use rank::Figures;
pub(crate) use rank::{RankArguments, run as run_rank};

/// Measure collectives, training steps by strategy, and checkpoints on the configured world; seconds each
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// What to measure [default: all]
    #[arg(value_enum, value_name = "WHAT")]
    what: Option<Subject>,

    #[command(flatten)]
    world: WorldArguments,

    /// Rounds, of which medians are told
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = at_least_one)]
    rounds: usize,

    /// Size of the largest buffer, and of the checkpoint
    #[arg(long = "size", value_name = "SIZE", default_value = "32MiB")]
    size: ByteSize,

    /// Folder for the checkpoint, on the disk to be measured [default: the system's for temporary files]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<OsString>,

    /// Write one JSON object in the place of tables
    #[arg(long)]
    json: bool,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Subject {
    /// Latency and bandwidth of collectives, by size
    Collectives,
    /// A training step, by strategy
    Step,
    /// Saving and loading, beside bare writes and reads
    Checkpoint,
}

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Self::Collectives => "collectives",
            Self::Step => "step",
            Self::Checkpoint => "checkpoint",
        }
    }
}

/// Runs `sconce bench`. Must be called on the main thread.
///
/// # Errors
/// When nothing could be started or measured.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let ByteSize(size) = arguments.size;
    if size < 1 << 20 {
        return Err(CommandError::usage(format!(
            "--size {}: at least 1MiB is needed",
            arguments.size
        )));
    }
    let folder = arguments.folder.clone().unwrap_or_else(|| std::env::temp_dir().into());
    let subjects = match arguments.what {
        Some(subject) => vec![subject],
        None => vec![Subject::Collectives, Subject::Step, Subject::Checkpoint],
    };
    let mut words = [arguments.rounds.to_string().into(), size.to_string().into(), folder].to_vec();
    words.extend(subjects.iter().map(|subject| subject.name().into()));
    let (ended, figures): (_, Vec<Figures>) = arguments.world.run(rank::NAME, words)?;
    if figures.len() < subjects.len() || ended != ExitCode::SUCCESS {
        return Err(CommandError::failure("the ranks ended before all was measured"));
    }
    print(&if arguments.json {
        as_json(&figures)
    } else {
        as_text(&figures)
    })?;
    Ok(ExitCode::SUCCESS)
}

fn as_json(figures: &[Figures]) -> String {
    let mut object = serde_json::Map::new();
    for figures in figures {
        let (name, values) = match figures {
            Figures::Collectives { ranks, rows } => ("collectives", json!({ "ranks": ranks, "rows": rows })),
            Figures::Step { ranks, rows } => ("step", json!({ "ranks": ranks, "rows": rows })),
            Figures::Checkpoint { ranks, bytes, rows } => {
                ("checkpoint", json!({ "ranks": ranks, "bytes": bytes, "rows": rows }))
            }
        };
        object.insert(name.to_owned(), values);
    }
    format!("{:#}\n", serde_json::Value::Object(object))
}

fn as_text(figures: &[Figures]) -> String {
    let table = |figures: &Figures| match figures {
        Figures::Collectives { ranks, rows } => {
            let row = |row: &rank::CollectiveRow| {
                let bandwidth =
                    |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2} GB/s"));
                vec![
                    row.operation.clone(),
                    if row.bytes == 0 {
                        "-".to_owned()
                    } else {
                        ByteSize(row.bytes).to_string()
                    },
                    row.dtype.clone(),
                    duration(row.seconds),
                    bandwidth(row.algorithm_gb_per_s),
                    bandwidth(row.bus_gb_per_s),
                ]
            };
            let header = ["operation", "size", "dtype", "time", "algorithm", "bus"];
            let rows = Vec::from_iter(rows.iter().map(row));
            format!("collectives, {ranks} ranks\n") + &aligned_table(&header, &["operation", "dtype"], &rows)
        }
        Figures::Step { ranks, rows } => {
            let row = |row: &rank::StepRow| {
                vec![
                    row.strategy.clone(),
                    duration(row.seconds),
                    format!("{:.2}", row.of_data_parallel),
                    ByteSize(row.bytes_held).to_string(),
                ]
            };
            let header = ["strategy", "step", "of data_parallel", "held by a rank"];
            let rows = Vec::from_iter(rows.iter().map(row));
            format!("training step, {ranks} ranks\n") + &aligned_table(&header, &["strategy"], &rows)
        }
        Figures::Checkpoint { ranks, bytes, rows } => {
            let row = |row: &rank::CheckpointRow| {
                vec![
                    row.what.clone(),
                    duration(row.seconds),
                    format!("{:.2} GB/s", row.gb_per_s),
                    row.of
                        .as_ref()
                        .map_or_else(|| "-".to_owned(), |of| format!("{:.2} {}", of.ratio, of.what)),
                ]
            };
            let header = ["what", "time", "bandwidth", "times as long as"];
            let rows = Vec::from_iter(rows.iter().map(row));
            let size = ByteSize(*bytes);
            format!("checkpoint of {size}, {ranks} ranks\n") + &aligned_table(&header, &["what"], &rows)
        }
    };
    let tables = figures.iter().map(table);
    tables.collect::<Vec<_>>().join("\n")
}

/// Returns a time in the unit that fits.
fn duration(seconds: f64) -> String {
    match seconds {
        _ if seconds < 1e-3 => format!("{:.1} us", seconds * 1e6),
        _ if seconds < 1.0 => format!("{:.2} ms", seconds * 1e3),
        _ => format!("{seconds:.2} s"),
    }
}
