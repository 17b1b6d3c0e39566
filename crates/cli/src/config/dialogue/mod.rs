//! `sconce config` without a subcommand: questions, and the configuration file that follows from the answers.
//!
//! In reading order: the [`questions`], which settings follow from their answers ([`outcome`]), the way through them
//! ([`flow`]), and who answers ([`ask`]): somebody at a terminal ([`menus`]), or lines from a pipe ([`lines`]).
//! Nothing is written before the last question, and the file is there as a whole or as it was.

mod answers;
mod ask;
mod flow;
mod lines;
mod menus;
mod outcome;
mod question;
mod questions;

use std::io::{self, IsTerminal as _};
use std::path::Path;
use std::process::ExitCode;

use sconce_core::config::{Configuration, DEEPSPEED_FILE, Format, Value};

use crate::command_error::CommandError;
use crate::terminal::{note, print, shown, tell};
use answers::Answers;
use ask::Ask;
use flow::Course;
use lines::Lines;
use menus::Menus;
use question::{Question, choice};

/// The last question.
const WRITE: &str = "write";
const LAST: Question = Question::menu(
    WRITE,
    "Write this file?",
    &[choice("yes", "yes"), choice("no", "no, end without writing anything")],
)
.proposing("yes");

/// Asks for the settings of `file` and writes them to it; proposes what it says already. `is_default` tells whether
/// `sconce launch` reads it by itself.
///
/// # Errors
/// When the file there is none of ours, nobody answers, or it cannot be written.
pub(super) fn run(file: &Path, is_default: bool) -> Result<ExitCode, CommandError> {
    let before = read(file)?;
    let mut ask: Box<dyn Ask> = if draws_menus() {
        Box::new(Menus::new())
    } else {
        let echoes = !io::stdin().is_terminal();
        Box::new(Lines::new(io::stdin().lock(), io::stderr(), echoes))
    };
    let Some(configuration) = asked(&before, file, &mut *ask)? else {
        tell("nothing was written\n");
        return Ok(ExitCode::FAILURE);
    };
    let written = configuration.write(file, &|setting| Some(setting.about.to_owned()));
    written.map_err(CommandError::failure)?;
    print(&farewell(file, is_default))?;
    Ok(ExitCode::SUCCESS)
}

/// What the file says already; nothing where there is none.
fn read(file: &Path) -> Result<Configuration, CommandError> {
    if !file.exists() {
        return Ok(Configuration::new());
    }
    let configuration = Configuration::read(file).map_err(|error| {
        CommandError::failure(error).hint("mend or remove that file, or name another one: --config_file FILE")
    })?;
    for warning in configuration.warnings() {
        note(&warning.to_string());
    }
    Ok(configuration)
}

fn draws_menus() -> bool {
    let can_draw = std::env::var_os("TERM").is_some_and(|terminal| terminal != "dumb");
    can_draw && io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Goes through the questions; `None` if whoever answers goes away.
fn asked(before: &Configuration, file: &Path, ask: &mut dyn Ask) -> Result<Option<Configuration>, CommandError> {
    let given = |path: &str| match before.value(path)? {
        // One that stands in this file is no file's name.
        Value::DeepSpeed(_) => None,
        value => Some(value.to_string()),
    };
    let questions = Vec::from_iter(questions::QUESTIONS.iter().copied().chain([LAST]));
    let course = Course {
        questions: &questions,
        known: &|key| outcome::answer_of(key, &given),
        check: &outcome::check,
        shown_before: &|key, answers| (key == WRITE).then(|| preview(before, answers, file)),
    };
    let answers = course.walk(ask)?;
    let answers = answers.filter(|answers| answers.is(WRITE, "yes"));
    answers.map(|answers| changed(before, &answers)).transpose()
}

/// The settings of before, but for those that the dialogue decides.
fn changed(before: &Configuration, answers: &Answers) -> Result<Configuration, CommandError> {
    let mut configuration = before.clone();
    for (path, value) in outcome::settings(answers) {
        match value {
            Some(value) => configuration.set(path, &value).map_err(CommandError::failure)?,
            None => drop(configuration.remove(path)),
        }
    }
    Ok(configuration)
}

fn preview(before: &Configuration, answers: &Answers, file: &Path) -> String {
    let name = shown(&file.display().to_string());
    let text = match changed(before, answers) {
        Ok(configuration) => configuration.to_text(Format::of(file), &|_| None),
        Err(error) => error.to_string(),
    };
    let indented = text.lines().map(|line| format!("  {}\n", shown(line)));
    let mut preview = format!("\n{name}:\n{}", String::from_iter(indented));
    if file.exists() {
        preview += "It takes the place of the file that is there, with its comments.\n";
    }
    if matches!(before.value(DEEPSPEED_FILE), Some(Value::DeepSpeed(_))) {
        preview += "The DeepSpeed configuration in that file is lost: to keep it, move it to a file of its own.\n";
    }
    preview
}

fn farewell(file: &Path, is_default: bool) -> String {
    let name = shown(&file.display().to_string());
    let option = if is_default {
        String::new()
    } else {
        format!(" --config_file {name}")
    };
    format!(
        "wrote {name}\nnext:\n  sconce launch{option} PROGRAM\nevery value, and who gave it:\n  sconce config show --explain{option}\n"
    )
}
