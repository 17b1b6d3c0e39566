//! `sconce config show`: every setting of a run, and who gave it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use sconce_core::config::{Configuration, Configured, DEEPSPEED_FILE, Format, Paradigm, SETTINGS, Setting, Value};
use sconce_core::deepspeed::{DeepSpeedConfig, Validation};
use serde_json::{Map, Value as Json, json};

use crate::command_error::CommandError;
use crate::launch::configured::Typed;
use crate::terminal::{note, print, shown};

/// Print what `sconce launch` would be told: by its flags, the environment and configuration files, in this order
///
/// What a program says in its code wins over all of them, and is not known here.
#[derive(Debug, Args)]
#[command(override_usage = "sconce config show [OPTIONS] [-- LAUNCH_FLAGS...]")]
pub(crate) struct Arguments {
    /// Configuration file; of several, a later one wins [default: the one that `sconce launch` reads by default]
    #[arg(long = "config_file", alias = "config-file", value_name = "FILE")]
    config_files: Vec<PathBuf>,

    /// Print all settings, each with who gave it, and the defaults
    #[arg(long)]
    explain: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,

    /// Flags of `sconce launch`
    #[arg(last = true, value_name = "LAUNCH_FLAGS")]
    flags: Vec<OsString>,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let typed = Typed::read(&arguments.flags)?;
    let (said, files) = typed.said(&arguments.config_files)?;
    for warning in said.warnings() {
        note(&warning.to_string());
    }
    said.paradigm().map_err(CommandError::usage)?;
    let text = match (arguments.json, arguments.explain) {
        (true, explain) => json_of(&typed, &said, explain)?,
        (false, true) => explained(&typed, &said, &files)?,
        (false, false) => said.to_text(Format::Yaml, &|_| None),
    };
    print(&shown(&text))?;
    Ok(ExitCode::SUCCESS)
}

/// A setting with its value and origin, and why it has no effect, if so.
type Line = (&'static Setting, Configured, Option<String>);

fn lines(typed: &Typed, said: &Configuration) -> Result<Vec<Line>, CommandError> {
    let all = said.clone().or(Configuration::defaults());
    let uses_deepspeed = said.paradigm().is_ok_and(|paradigm| paradigm == Paradigm::DeepSpeed);
    let file = said.value(DEEPSPEED_FILE).filter(|_| uses_deepspeed);
    let file =
        file.and_then(|file| DeepSpeedConfig::read_or_decode(Path::new(&file.to_string()), Validation::default()).ok());
    let mut lines = Vec::new();
    for (setting, configured) in all.iter() {
        let is_default = said.get(setting.path).is_none();
        let counts = is_default || said.counts(setting).map_err(CommandError::usage)?;
        let keys = setting
            .variable
            .map_or(&[][..], |variable| typed.deciding_keys(variable));
        let decides = |file: &&DeepSpeedConfig| is_default && keys.iter().any(|key| file.states(key));
        let without_effect = match file.as_ref().filter(decides) {
            Some(file) => Some(format!("without effect: {} decides it", file.file())),
            None => (!counts).then(|| idle(said)),
        };
        lines.push((setting, configured.clone(), without_effect));
    }
    Ok(lines)
}

fn idle(said: &Configuration) -> String {
    match said.paradigm() {
        Ok(Paradigm::DeepSpeed) => "without effect beside DeepSpeed".into(),
        Ok(Paradigm::Fsdp) => "without effect beside FSDP".into(),
        _ => "without effect: what it belongs to is not in use".into(),
    }
}

fn explained(typed: &Typed, said: &Configuration, files: &[PathBuf]) -> Result<String, CommandError> {
    let mut text = String::new();
    match files {
        [] => text.push_str("no configuration file\n"),
        files => files
            .iter()
            .for_each(|file| text.push_str(&format!("file {}\n", file.display()))),
    }
    let lines = lines(typed, said)?;
    let rows = lines.iter().map(|(setting, configured, idle)| {
        let value = match &configured.value {
            Value::DeepSpeed(_) => "(keys of DeepSpeed's)".to_owned(),
            value => value.to_string(),
        };
        let origin = configured.origin.to_string();
        let origin = match idle {
            Some(idle) => format!("{origin}, {idle}"),
            None => origin,
        };
        (setting.path, value, origin)
    });
    let rows = Vec::from_iter(rows);
    let width = |length: fn(&(&str, String, String)) -> usize| rows.iter().map(length).max().unwrap_or(0);
    let (of_paths, of_values) = (width(|row| row.0.len()), width(|row| row.1.chars().count()).min(32));
    for (path, value, origin) in &rows {
        text.push_str(&format!("{path:of_paths$}  {value:of_values$}  {origin}\n"));
    }
    let unsaid = SETTINGS
        .iter()
        .filter(|setting| lines.iter().all(|(known, ..)| known.path != setting.path));
    for setting in unsaid {
        text.push_str(&format!(
            "{:of_paths$}  {:of_values$}  nobody says it\n",
            setting.path, "-"
        ));
    }
    Ok(text)
}

fn json_of(typed: &Typed, said: &Configuration, explain: bool) -> Result<String, CommandError> {
    let mut object = Map::new();
    if explain {
        for (setting, configured, idle) in lines(typed, said)? {
            let origin = configured.origin.to_string();
            let has_effect = idle.is_none();
            let entry = json!({"value": configured.value.to_json(), "origin": origin, "has_effect": has_effect});
            object.insert(setting.path.into(), entry);
        }
    } else {
        object.extend(
            said.iter()
                .map(|(setting, given)| (setting.path.into(), given.value.to_json())),
        );
    }
    Ok(format!("{:#}\n", Json::Object(object)))
}
