//! `sconce report`: one page of plots from what runs have logged, to look at and to send on.
//!
//! The page needs nothing but itself: plots are SVG within it, and no script or font is fetched from anywhere. With `--png`
//! the same plots are pictures too.

mod axis;
mod bars;
mod colours;
mod line_plot;
mod markup;
mod page;
mod pictures;
mod run;
mod trace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use crate::command_error::CommandError;
use crate::terminal::{self, shown};

/// Draw what runs have logged: loss, learning rate, gradient norm, speed, memory, and where the time of each rank went
#[derive(Debug, Args)]
#[command(
    after_help = "Values are those of the tracker `jsonl` or of --metrics_out: one JSON object a line, with `step` and \
                        numbers. Time is that of trace-rank-N.json, which --profile writes, in the run's folder."
)]
pub(crate) struct Arguments {
    /// Folder of a run, or a file of JSON lines; several are drawn over each other
    #[arg(required = true, value_name = "RUN_DIR_OR_JSONL")]
    runs: Vec<PathBuf>,
    /// Where to write the page
    #[arg(long, default_value = "report.html")]
    out: PathBuf,
    /// Folder for the same plots as PNG files, one each
    #[arg(long, value_name = "FOLDER")]
    png: Option<PathBuf>,
}

/// Runs `sconce report`.
///
/// # Errors
/// A run that is not there or cannot be read, and a page, a picture or a stdout that cannot be written to.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let runs = run::read_all(&arguments.runs)?;
    for note in runs.iter().flat_map(|run| &run.notes) {
        terminal::note(note);
    }
    let page = page::of(&runs);
    std::fs::write(&arguments.out, page)
        .map_err(|error| CommandError::failure(format!("{}: {error}", arguments.out.display())))?;
    terminal::print(&format!("wrote {}\n", shown(&arguments.out.display().to_string())))?;
    if let Some(folder) = &arguments.png {
        if let Some(note) = pictures::write(&runs, folder)? {
            terminal::note(&note);
        }
        terminal::print(&format!(
            "wrote PNG files into {}\n",
            shown(&folder.display().to_string())
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}
