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
    Configuration, ConfigurationError, Configured, DEEPSPEED, DEEPSPEED_FILE, DISTRIBUTED_TYPE, FSDP, Origin,
    PARALLELISM, Paradigm, Setting, Value, default_file,
};

use super::Arguments;
use super::foreign_flags::refusal;
use super::surroundings::{Machines, are_told_by_environment};
use crate::command_error::CommandError;
use crate::terminal::{shown, tell};

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
    /// Whether a file has a DeepSpeed configuration in it, of which it has been told what is to be known.
    pub(super) has_deepspeed: bool,
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
    if !arguments.quiet {
        let warnings = merged.warnings().iter();
        warnings.for_each(|warning| tell(&shown(&format!("warning: {warning}\n"))));
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

    /// The keys of a DeepSpeed configuration that decide what a variable says.
    pub(crate) fn deciding_keys(&self, variable: &str) -> &'static [&'static str] {
        let flags = self.arguments.deepspeed.flags().into_iter();
        let mut flags = flags.chain(self.arguments.training_flags());
        flags
            .find(|flag| flag.variable == variable)
            .map_or(&[], |flag| flag.keys)
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
        arguments.from_files.has_deepspeed = from_files.has_deepspeed;
        let ranks = Machines::resolve(&arguments, |_| None)?.ranks();
        super::settings::check(&arguments, ranks, super::environment::of_ranks(&arguments))
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

/// Returns the words that files add, and where they are from.
fn words_of(merged: &Configuration, typed: &Typed) -> Result<(Vec<OsString>, FromFiles), ConfigurationError> {
    let command = Launch::command();
    let mut added = Added {
        command: &command,
        typed,
        words: Vec::new(),
        from_files: FromFiles {
            deepspeed_fields: merged.deepspeed_fields(),
            has_deepspeed: has_deepspeed(merged),
            ..FromFiles::default()
        },
    };
    let of_files = merged.of_files()?;
    added.add_switches(merged, &of_files)?;
    for (setting, configured) in of_files {
        let gives_way = match setting.path {
            // GPUs are of no use to who computes on the CPU this once.
            "gpu_ids" => typed.has("cpu"),
            // The environment wins over files also where it has names of its own.
            path => are_told_by_environment(path, of_process),
        };
        if !gives_way {
            added.add_setting(setting, configured)?;
        }
    }
    // A switch that two settings turn on (`use_cpu`, and ranks on CPUs) is given once.
    added.words.sort_unstable();
    added.words.dedup();
    Ok((added.words, added.from_files))
}

/// Whether a DeepSpeed configuration stands in a file of ours, or is one that was named as such.
fn has_deepspeed(merged: &Configuration) -> bool {
    let is_whole = |origin: &Origin| matches!(origin, Origin::File(place) if place.path.is_empty());
    let file = merged.get(DEEPSPEED_FILE);
    file.is_some_and(|file| matches!(file.value, Value::DeepSpeed(_)) || is_whole(&file.origin))
}

/// What is put in front of the words that are typed.
struct Added<'t> {
    command: &'t clap::Command,
    typed: &'t Typed,
    words: Vec<OsString>,
    from_files: FromFiles,
}

impl Added<'_> {
    /// Adds the switches that sections need to have an effect.
    fn add_switches(
        &mut self,
        merged: &Configuration,
        of_files: &[(&'static Setting, &Configured)],
    ) -> Result<(), ConfigurationError> {
        let first_of = |section: &str| {
            let mut settings = of_files.iter();
            let found = settings.find(|(setting, _)| setting.section() == Some(section));
            found.map(|(_, configured)| *configured)
        };
        let of_type = merged.get(DISTRIBUTED_TYPE);
        let of_type = of_type.filter(|configured| matches!(configured.origin, Origin::File(_)));
        let switches = match merged.paradigm()? {
            Paradigm::DeepSpeed => vec![("use_deepspeed", of_type.or_else(|| first_of(DEEPSPEED)))],
            Paradigm::Fsdp => vec![
                ("use_fsdp", of_type.or_else(|| first_of(FSDP))),
                ("use_parallelism_config", first_of(PARALLELISM)),
            ],
            Paradigm::Replicated => {
                let on_cpu = of_type.filter(|configured| configured.value.as_text() == Some("MULTI_CPU"));
                vec![("cpu", on_cpu)]
            }
        };
        for (flag, cause) in switches {
            if let Some(configured) = cause.filter(|_| !self.typed.has(flag)) {
                self.add(flag, None, None, &configured.origin);
            }
        }
        Ok(())
    }

    fn add_setting(&mut self, setting: &'static Setting, configured: &Configured) -> Result<(), ConfigurationError> {
        let (value, origin) = (&configured.value, &configured.origin);
        let argument = setting.flag.and_then(|flag| {
            let mut arguments = self.command.get_arguments();
            Some((flag, arguments.find(|argument| argument.get_long() == Some(flag))?))
        });
        match (argument, value) {
            (Some((flag, argument)), Value::Flag(on)) if matches!(argument.get_action(), ArgAction::SetTrue) => {
                if *on {
                    self.add(flag, None, setting.variable, origin);
                }
            }
            (Some((flag, _)), value) => self.add(flag, Some(value), setting.variable, origin),
            (None, value) => match (setting.flag, setting.variable) {
                (_, Some(variable)) => self.from_files.variables.push((variable, value.to_string())),
                // `compute_environment`, and `distributed_type`, which is a switch.
                (None, None) => {}
                (Some(_), None) if setting.default == Some(value.to_string().as_str()) => {}
                (Some(flag), None) => {
                    return Err(ConfigurationError::Unsupported {
                        place: origin.to_string(),
                        found: value.to_string(),
                        reason: format!("this version of sconce launch has no --{flag}"),
                    });
                }
            },
        }
        Ok(())
    }

    fn add(&mut self, flag: &str, value: Option<&Value>, variable: Option<&'static str>, origin: &Origin) {
        let flag = format!("--{flag}");
        self.words.push(match value {
            Some(value) => format!("{flag}={value}").into(),
            None => flag.clone().into(),
        });
        self.from_files.origins.push((flag, variable, origin.to_string()));
    }
}
