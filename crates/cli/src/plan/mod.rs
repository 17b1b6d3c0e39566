//! `sconce plan`: the cheapest way to train a model that fits, as a configuration file.

mod config_file;

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use sconce_core::config::Format;

use crate::byte_size::ByteSize;
use crate::command_error::CommandError;
use crate::estimate_memory::{ModelArguments, name_of};
use crate::terminal::{note, print};

/// Write the cheapest way to train a model that fits into the memory there is, as a file for `sconce launch --config_file`
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  sconce plan ./Llama-2-7b --device cuda --memory 24GiB --host_memory 256GiB -n 8 --mixed_precision bf16 \
                        --out plan.yaml\n\nExit code: 1 when nothing fits."
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,

    /// File to write, which must not exist: YAML, or what its name says (.toml, .json) [default: stdout]
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    out: Option<PathBuf>,

    /// Write over a file that exists
    #[arg(long, requires = "out", help_heading = "Output")]
    overwrite: bool,

    /// Folder on a local disk for state, in plans that need one
    #[arg(
        long = "nvme_path",
        alias = "nvme-path",
        value_name = "FOLDER",
        default_value = "nvme",
        help_heading = "Output"
    )]
    nvme_path: String,
}

/// Runs `sconce plan`.
///
/// # Errors
/// When the model cannot be read, nothing fits, or the file cannot be written.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let (memory, host) = (arguments.model.memory, arguments.model.host_memory);
    if memory.is_none() && host.is_none() {
        return Err(
            CommandError::usage("what must the plan fit into?").hint("give --memory SIZE, such as --memory 24GiB")
        );
    }
    let model = arguments.model.open()?;
    let workload = arguments.model.workload()?;
    let (estimates, fitting) = arguments.model.recommend(&model, &workload)?;
    let Some(number) = fitting else {
        let least = estimates.iter().map(|estimate| estimate.device_peak).min().unwrap_or(0);
        let error = CommandError::failure(format!(
            "nothing fits: the most sparing way takes {} a rank",
            ByteSize(least)
        ));
        return Err(error.hint("give more ranks, a smaller --batch_size or --sequence_length, or more memory"));
    };
    let plan = config_file::Plan {
        arguments: &arguments.model,
        model: &model,
        workload: &workload,
        passed_over: &estimates[..number],
        chosen: &estimates[number],
        folder: &arguments.nvme_path,
    };
    let format = arguments.out.as_deref().map_or(Format::Yaml, Format::of);
    let text = plan.to_text(format).map_err(CommandError::failure)?;
    let Some(path) = &arguments.out else {
        print(&text)?;
        return Ok(ExitCode::SUCCESS);
    };
    let mut options = OpenOptions::new();
    options.write(true);
    match arguments.overwrite {
        true => options.create(true).truncate(true),
        false => options.create_new(true),
    };
    let written = options.open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|reason| {
        let error = CommandError::failure(format!("{}: cannot be written: {reason}", path.display()));
        match reason.kind() {
            io::ErrorKind::AlreadyExists => error.hint("give --overwrite to replace it"),
            _ => error,
        }
    })?;
    note(&format!(
        "{}: {}, {} a rank",
        path.display(),
        name_of(&estimates[number].choice),
        ByteSize(estimates[number].device_peak)
    ));
    Ok(ExitCode::SUCCESS)
}
