//! Whoever answers: menus on a terminal, or lines over a pipe. The questionnaire knows neither.

use super::question::Choice;
use crate::command_error::CommandError;

/// A question as it is put.
#[derive(Debug)]
pub(super) struct Prompt<'a> {
    pub(super) text: &'a str,
    pub(super) form: Form<'a>,
    /// The answer that is taken when none is typed.
    pub(super) default: Option<&'a str>,
}

/// What an answer may be.
#[derive(Debug, Clone, Copy)]
pub(super) enum Form<'a> {
    /// One of these.
    Menu(&'a [Choice]),
    /// A text that is right by the check, which says what was expected otherwise.
    Typed(&'a dyn Checks),
}

/// Checks what was typed.
pub(super) trait Checks: std::fmt::Debug {
    /// # Errors
    /// What is expected in place of `answer`.
    fn check(&self, answer: &str) -> Result<(), String>;
}

/// What came of a question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reply {
    /// The value of a choice, or a text that was checked.
    Answer(String),
    /// To the question before.
    Back,
    /// Away, and nothing is written.
    Quit,
}

/// Puts questions to somebody.
pub(super) trait Ask {
    /// Puts one question until it is answered.
    ///
    /// # Errors
    /// When nobody can answer any more.
    fn ask(&mut self, prompt: &Prompt<'_>) -> Result<Reply, CommandError>;

    /// Shows a text that needs no answer.
    fn tell(&mut self, text: &str);
}
