//! `sconce config update`: an old file in today's keys, with what it leaves out.

use std::process::ExitCode;

use clap::Args;
use sconce_core::config::{Configuration, DISTRIBUTED_TYPE, Paradigm};

use super::FileArgument;
use crate::command_error::CommandError;
use crate::terminal::{note, print};

/// Rewrite a configuration file in today's keys, and write the defaults of keys at its top that it leaves out
///
/// Comments and keys without effect do not survive; each of these keys is named.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    file: FileArgument,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let file = arguments.file.file()?;
    let mut configuration = Configuration::read(&file).map_err(CommandError::usage)?;
    for warning in configuration.warnings() {
        note(&warning.to_string());
    }
    // What was found from its sections is written down, before it is given a default.
    let paradigm = configuration.paradigm().map_err(CommandError::usage)?;
    let kind = match paradigm {
        Paradigm::DeepSpeed => "DEEPSPEED",
        Paradigm::Fsdp => "FSDP",
        Paradigm::Replicated => "NO",
    };
    if configuration.get(DISTRIBUTED_TYPE).is_none() {
        configuration
            .set(DISTRIBUTED_TYPE, kind)
            .map_err(CommandError::failure)?;
    }
    let defaults = Configuration::defaults();
    for (setting, configured) in defaults.iter().filter(|(setting, _)| setting.section().is_none()) {
        if configuration.get(setting.path).is_none() {
            let text = configured.value.to_string();
            configuration.set(setting.path, &text).map_err(CommandError::failure)?;
        }
    }
    configuration.write(&file, &|_| None).map_err(CommandError::failure)?;
    print(&format!("updated {}\n", file.display()))?;
    Ok(ExitCode::SUCCESS)
}
