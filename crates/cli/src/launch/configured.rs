//! What configuration files say, as flags that nobody has typed.
//!
//! A setting of a file that neither the command line nor the environment gives is put in front of the words of the command
//! line, which then is read again: files need no way of their own through the launcher. What has no flag becomes a variable
//! of the ranks. An error that such a flag leads to is told with the place in the file.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgAction, CommandFactory, FromArgMatches, Parser};
use sconce_collectives::environment::of_process;
use sconce_core::config::{
    Configuration, Configured, DISTRIBUTED_TYPE, Origin, Paradigm, Setting, Value, default_file,
};

use super::Arguments;
use super::foreign_flags::refusal;
use crate::command_error::CommandError;

/// The command line of `sconce launch` alone.
#[derive(Debug, Parser)]
#[command(name = "sconce launch", no_binary_name = true)]
struct Launch {
    #[command(flatten)]
    arguments: Arguments,
}

/// What files add to a command line.
#[derive(Debug, Default)]
pub(crate) struct FromFiles {
    /// What the ranks are told by variables only.
    pub(super) variables: Vec<(&'static str, String)>,
    /// Names of flags with their dashes, variables that say the same, and the places in the files.
    origins: Vec<(String, Option<&'static str>, String)>,
    /// The keys of DeepSpeed's section, for Accelerate.
    pub(super) deepspeed_fields: String,
}

impl FromFiles {
    /// Says whether a file, not the command line, gives a flag.
    pub(super) fn has(&self, flag: &str) -> bool {
        self.origins.iter().any(|(name, ..)| name == flag)
    }

    /// Adds to an error where the flags and variables are from that it speaks of.
    pub(super) fn explain(&self, error: CommandError) -> CommandError {
        let text = error.to_string();
        let speaks_of = |name: &str| {
            let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
            let ends = text.match_indices(name).map(|(start, _)| start + name.len());
            ends.into_iter().any(|end| !text[end..].starts_with(is_part))
        };
        let is_meant =
            |(flag, variable, _): &&(String, Option<&str>, String)| speaks_of(flag) || variable.is_some_and(speaks_of);
        let meant = self.origins.iter().filter(is_meant);
        meant.fold(error, |error, (flag, _, origin)| {
            error.hint(format!("{flag} is from {origin}"))
        })
    }
}

/// Reads the words after `sconce launch`, and the files that they name or the one that is read by default.
///
/// # Errors
/// Words or files that cannot be used.
pub(crate) fn arguments(words: &[OsString]) -> Result<Arguments, CommandError> {
    let typed = Typed::read(words)?;
    let files = typed.files();
    if files.is_empty() {
        return Ok(typed.arguments);
    }
    let merged = typed.over(&files)?;
    let (words_of_files, from_files) = words_of(&merged, &typed).map_err(CommandError::usage)?;
    let mut arguments = parse(&[&words_of_files, words].concat()).map_err(|error| from_files.explain(error))?;
    for warning in merged.warnings() {
        arguments.tell(&format!("warning: {warning}\n"));
    }
    arguments.from_files = from_files;
    Ok(arguments)
}

/// What a command line says by itself.
pub(crate) struct Typed {
    arguments: Arguments,
    /// Names of flags without dashes, and their values.
    flags: Vec<(String, Option<String>)>,
}

impl Typed {
    /// Reads the words after `sconce launch`.
    pub(crate) fn read(words: &[OsString]) -> Result<Self, CommandError> {
        let command = Launch::command();
        let matches = command.clone().try_get_matches_from(words).map_err(worded)?;
        let mut flags = Vec::new();
        for argument in command.get_arguments() {
            let id = argument.get_id().as_str();
            if let Some(name) = argument.get_long()
                && matches.value_source(id) == Some(ValueSource::CommandLine)
            {
                let mut values = matches.get_raw(id).into_iter().flatten();
                let value = values.next().map(|value| value.to_string_lossy().into_owned());
                let is_switch = matches!(argument.get_action(), ArgAction::SetTrue);
                flags.push((name.to_owned(), value.filter(|_| !is_switch)));
            }
        }
        let arguments = Launch::from_arg_matches(&matches).map_err(worded)?.arguments;
        Ok(Self { arguments, flags })
    }

    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|(name, _)| name == flag)
    }

    /// The files that it names, else the one that is read by default, if it is there: not with `--cpu`, as in Accelerate.
    fn files(&self) -> Vec<PathBuf> {
        if !self.arguments.config_files.is_empty() || self.arguments.cpu {
            return self.arguments.config_files.clone();
        }
        let default = default_file(of_process).filter(|file| file.is_file());
        default.into_iter().collect()
    }

    /// Puts what it says over what environment and files say.
    fn over(&self, files: &[PathBuf]) -> Result<Configuration, CommandError> {
        let in_files = Configuration::read_all(files.iter().map(PathBuf::as_path)).map_err(CommandError::usage)?;
        let flags = self.flags.iter().map(|(name, value)| (name.as_str(), value.as_deref()));
        let typed = Configuration::from_flags(flags).map_err(CommandError::usage)?;
        typed
            .over_environment_and_files(of_process, in_files)
            .map_err(CommandError::usage)
    }

    /// Everything that is said of a run: by the command line, the environment, and the files that it names besides
    /// `files`, or the one that is read by default.
    pub(crate) fn said(&self, files: &[PathBuf]) -> Result<(Configuration, Vec<PathBuf>), CommandError> {
        let files = if files.is_empty() { self.files() } else { files.to_vec() };
        Ok((self.over(&files)?, files))
    }
}

/// Checks what a file says as `sconce launch` would, and says what is to be known.
pub(crate) fn check_file(file: &Path) -> Result<Vec<String>, CommandError> {
    let configuration = Configuration::read(file).map_err(CommandError::usage)?;
    let nothing = Typed {
        arguments: parse(&[OsString::from("true")])?,
        flags: Vec::new(),
    };
    let (mut words, from_files) = words_of(&configuration, &nothing).map_err(CommandError::usage)?;
    words.push("true".into());
    let checked = parse(&words).and_then(|mut arguments| {
        arguments.from_files.variables.clone_from(&from_files.variables);
        super::settings::check(&arguments, super::environment::of_ranks(&arguments))
    });
    let warning = checked.map_err(|error| from_files.explain(error))?;
    let warnings = configuration.warnings().iter().map(ToString::to_string);
    let lines = warning
        .into_iter()
        .flat_map(|text| text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>());
    Ok(warnings.chain(lines).collect())
}

fn parse(words: &[OsString]) -> Result<Arguments, CommandError> {
    let launch = Launch::try_parse_from(words).map_err(worded)?;
    Ok(launch.arguments)
}

fn worded(error: clap::Error) -> CommandError {
    refusal(&error).unwrap_or_else(|| {
        let text = error.to_string();
        let end = text.find("\n\n").unwrap_or(text.len());
        CommandError::usage(text[..end].trim_start_matches("error: "))
    })
}

/// The words that files add, and where they are from.
fn words_of(
    merged: &Configuration,
    typed: &Typed,
) -> Result<(Vec<OsString>, FromFiles), sconce_core::config::ConfigurationError> {
    let command = Launch::command();
    let known = |flag: &str| {
        command
            .get_arguments()
            .find(|argument| argument.get_long() == Some(flag))
    };
    let mut words = Vec::new();
    let mut from_files = FromFiles {
        deepspeed_fields: merged.deepspeed_fields(),
        ..FromFiles::default()
    };
    let mut add = |flag: &str, value: Option<&Value>, variable, origin: &Origin| {
        let origin = origin.to_string();
        from_files.origins.push((format!("--{flag}"), variable, origin));
        words.push(match value {
            Some(value) => format!("--{flag}={value}").into(),
            None => format!("--{flag}").into(),
        });
    };
    let of_files = merged.of_files()?;
    let in_section = |start: &str| of_files.iter().find(|(setting, _)| setting.path.starts_with(start));
    let of_type = merged.get(DISTRIBUTED_TYPE);
    let switch = match merged.paradigm()? {
        Paradigm::DeepSpeed => Some(("use_deepspeed", "deepspeed_config.")),
        Paradigm::Fsdp => Some(("use_fsdp", "fsdp_config.")),
        Paradigm::Replicated => None,
    };
    if let Some((flag, section)) = switch.filter(|(flag, _)| !typed.has(flag)) {
        let is_of_file = |configured: &&Configured| matches!(configured.origin, Origin::File(_));
        let cause = of_type
            .filter(is_of_file)
            .or(in_section(section).map(|(_, configured)| *configured));
        cause
            .into_iter()
            .for_each(|configured| add(flag, None, None, &configured.origin));
    }
    if let Some((_, configured)) = in_section("parallelism_config.")
        && !typed.has("use_parallelism_config")
    {
        add("use_parallelism_config", None, None, &configured.origin);
    }
    let mut variables = Vec::new();
    for (
        Setting {
            path,
            flag,
            variable,
            default,
            ..
        },
        configured,
    ) in &of_files
    {
        let value = &configured.value;
        match (flag.map(|flag| (flag, known(flag))), value) {
            (Some((flag, Some(argument))), Value::Flag(on)) if matches!(argument.get_action(), ArgAction::SetTrue) => {
                if *on {
                    add(flag, None, *variable, &configured.origin);
                }
            }
            (Some((flag, Some(_))), value) => add(flag, Some(value), *variable, &configured.origin),
            // A value that says no more than what holds in any case.
            (_, value) if default.is_some_and(|default| default == value.to_string()) => {}
            (Some((flag, None)), value) if super::foreign_flags::reason(flag).is_some() => {
                return Err(sconce_core::config::ConfigurationError::Unsupported {
                    place: configured.origin.to_string(),
                    found: value.to_string(),
                    reason: super::foreign_flags::reason(flag).unwrap_or_default().into(),
                });
            }
            (_, value) => {
                if let Some(variable) = variable {
                    variables.push((*variable, value.to_string()));
                } else if *path == DISTRIBUTED_TYPE && value.as_text() == Some("MULTI_CPU") && !typed.has("cpu") {
                    add("cpu", None, None, &configured.origin);
                }
            }
        }
    }
    // A switch that two settings turn on (`use_cpu`, and ranks on CPUs) is given once.
    words.sort_unstable();
    words.dedup();
    from_files.variables = variables;
    Ok((words, from_files))
}
