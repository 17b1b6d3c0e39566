//! What the flags ask for together, checked before anything starts.
//!
//! What the ranks will read is made from the flags and resolved here first, by the same code: so a wrong combination or a
//! bad configuration file is one message of the launcher's, not one per rank.

use std::fmt::Write;

use sconce_core::deepspeed::DeepSpeedConfig;
use sconce_core::{AcceleratorBuilder, Error, RunSettings};

use super::arguments::Arguments;
use crate::command_error::CommandError;

/// A flag that the ranks read as a variable.
pub(super) struct Flag {
    pub(super) name: &'static str,
    pub(super) variable: &'static str,
    pub(super) value: Option<String>,
    /// The keys in a DeepSpeed configuration that decide the same.
    pub(super) keys: &'static [&'static str],
}

/// Checks what the flags, and the variables that the ranks inherit, ask for together: `of_ranks` is what the ranks will
/// find, of which there are `world_size`.
///
/// Returns what the user should know of the configuration file, as one message.
///
/// # Errors
/// Flags without effect, a configuration that cannot be used, a combination that cannot be.
pub(super) fn check(
    arguments: &Arguments,
    world_size: usize,
    of_ranks: impl Fn(&str) -> Option<String>,
) -> Result<Option<String>, CommandError> {
    let (deepspeed, fully_sharded) = (&arguments.deepspeed, &arguments.fully_sharded);
    if deepspeed.use_deepspeed && fully_sharded.use_fsdp {
        let error = CommandError::usage("--use_deepspeed and --use_fsdp exclude each other");
        return Err(error.hint("training state is sharded as one of them says; leave the other out"));
    }
    refuse_idle(deepspeed.use_deepspeed, &deepspeed.flags(), "--use_deepspeed")?;
    refuse_idle(fully_sharded.use_fsdp, &fully_sharded.flags(), "--use_fsdp")?;
    let mesh = &arguments.mesh;
    refuse_idle(mesh.use_parallelism_config, &mesh.flags(), "--use_parallelism_config")?;
    if mesh.use_parallelism_config && !fully_sharded.use_fsdp {
        let needs = "--use_parallelism_config needs --use_fsdp and --fsdp_version 2";
        return Err(CommandError::usage(needs));
    }
    if arguments.multi_gpu && world_size < 2 {
        return Err(CommandError::usage(
            "--multi_gpu needs at least two ranks: --num_processes 2",
        ));
    }
    if !deepspeed.use_deepspeed && !fully_sharded.use_fsdp {
        return Ok(None);
    }
    fully_sharded.check(&of_ranks)?;
    let flags = deepspeed
        .flags()
        .into_iter()
        .chain(fully_sharded.flags())
        .chain(mesh.flags());
    let given = flags
        .chain(arguments.training_flags())
        .filter(|flag| flag.value.is_some());
    let given = Vec::from_iter(given);
    if let Some(file) = &arguments.deepspeed.deepspeed_config_file {
        let config = DeepSpeedConfig::read_or_decode(file, Default::default()).map_err(CommandError::usage)?;
        // What stands in files may be said twice, if it is the same: see below.
        let typed = given.iter().filter(|flag| !arguments.from_files.has(flag.name));
        refuse_what_is_decided(typed, &config)?;
    }
    let settings = AcceleratorBuilder::default()
        .settings(world_size, of_ranks)
        .map_err(|error| CommandError::usage(in_flags(&error, &given)))?;
    if let Some(folder) = settings.disk.as_ref().map(|disk| &disk.folder)
        && !folder.is_dir()
    {
        let error = CommandError::usage(format!("there is no folder {} for state on nvme", folder.display()));
        return Err(error.hint("make it on a local disk, or name another"));
    }
    let is_told = arguments.from_files.has_deepspeed;
    Ok(warning(&settings).filter(|_| !is_told))
}

/// Refuses flags that count only together with another, `switch`.
fn refuse_idle(is_on: bool, flags: &[Flag], switch: &str) -> Result<(), CommandError> {
    let idle = Vec::from_iter(flags.iter().filter(|flag| flag.value.is_some()).map(|flag| flag.name));
    match idle.as_slice() {
        _ if is_on => Ok(()),
        [] => Ok(()),
        [one] => Err(CommandError::usage(format!("{one} needs {switch}"))),
        several => Err(CommandError::usage(format!("{} need {switch}", several.join(", ")))),
    }
}

/// Accelerate's rule: a flag and a file must not say the same thing twice.
fn refuse_what_is_decided<'f>(
    given: impl Iterator<Item = &'f Flag>,
    config: &DeepSpeedConfig,
) -> Result<(), CommandError> {
    let decided = Vec::from_iter(given.filter_map(|flag| {
        let key = flag.keys.iter().find(|key| config.states(key))?;
        Some(format!("{} (`{key}`)", flag.name))
    }));
    if decided.is_empty() {
        return Ok(());
    }
    let file = config.file();
    let error = CommandError::usage(format!("{file} decides already: {}", decided.join(", ")));
    Err(error.hint("leave these flags out, or write \"auto\" in the file for what flags are to decide"))
}

/// The message of an error in the settings; what a flag has set has the flag's name.
fn in_flags(error: &Error, given: &[Flag]) -> String {
    let (setting, value, expected) = match error {
        Error::Setting {
            setting,
            value,
            expected,
        } => ((*setting).to_owned(), value, expected),
        Error::FullySharded(sconce_fsdp::Error::Setting {
            setting,
            value,
            expected,
        }) => (format!("FSDP_{}", setting.to_uppercase()), value, expected),
        _ => return error.to_string(),
    };
    match given.iter().find(|flag| flag.variable == setting) {
        Some(flag) => format!("{} {value}: {expected}", flag.name),
        None => error.to_string(),
    }
}

fn warning(settings: &RunSettings) -> Option<String> {
    let config = settings
        .deepspeed
        .as_ref()
        .filter(|config| !config.warnings().is_empty())?;
    let mut message = format!("warning: {}\n", config.file());
    for warning in config.warnings() {
        let _ = writeln!(message, "  {warning}");
    }
    Some(message)
}
