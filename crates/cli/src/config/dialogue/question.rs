//! One question of the dialogue: when it is asked, what may be answered, and what is proposed.

use sconce_core::config::{Configuration, ConfigurationError};

use super::answers::Answers;
use super::ask::{Checks, Form};

/// A question; its answer is the value of a setting, or says which questions follow.
#[derive(Debug, Clone, Copy)]
pub(super) struct Question {
    /// The path of the setting that is asked for, or a name that only the dialogue knows.
    pub(super) key: &'static str,
    pub(super) text: &'static str,
    answered_by: AnsweredBy,
    asked: fn(&Answers) -> bool,
    proposed: Proposal,
}

/// One answer of a menu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) value: &'static str,
    pub(super) label: &'static str,
}

/// What stands for no value where a setting may have none.
pub(super) const NONE: &str = "none";

#[derive(Debug, Clone, Copy)]
enum AnsweredBy {
    Menu(&'static [Choice]),
    Typing(Typed),
}

/// What is typed: the value of a setting.
#[derive(Debug, Clone, Copy)]
struct Typed {
    key: &'static str,
    is_optional: bool,
}

#[derive(Debug, Clone, Copy)]
enum Proposal {
    Nothing,
    Always(&'static str),
    From(fn(&Answers) -> Option<String>),
}

const YES_OR_NO: &[Choice] = &[choice("true", "yes"), choice("false", "no")];

/// Makes an answer of a menu.
pub(super) const fn choice(value: &'static str, label: &'static str) -> Choice {
    Choice { value, label }
}

impl Choice {
    /// The label without its explanation.
    pub(super) fn short(&self) -> &'static str {
        self.label.split([':', ',']).next().unwrap_or(self.label)
    }
}

impl Question {
    /// Makes a question that a menu answers.
    pub(super) const fn menu(key: &'static str, text: &'static str, choices: &'static [Choice]) -> Self {
        Self::new(key, text, AnsweredBy::Menu(choices))
    }

    /// Makes a question that yes or no answers.
    pub(super) const fn yes_or_no(key: &'static str, text: &'static str) -> Self {
        Self::menu(key, text, YES_OR_NO).proposing("false")
    }

    /// Makes a question for the value of a setting.
    pub(super) const fn typed(key: &'static str, text: &'static str) -> Self {
        let is_optional = false;
        Self::new(key, text, AnsweredBy::Typing(Typed { key, is_optional }))
    }

    /// Makes a question for the value of a setting that may have none.
    pub(super) const fn optional(key: &'static str, text: &'static str) -> Self {
        let is_optional = true;
        Self::new(key, text, AnsweredBy::Typing(Typed { key, is_optional })).proposing(NONE)
    }

    const fn new(key: &'static str, text: &'static str, answered_by: AnsweredBy) -> Self {
        Self {
            key,
            text,
            answered_by,
            asked: |_| true,
            proposed: Proposal::Nothing,
        }
    }

    /// Asks only after such answers.
    pub(super) const fn when(self, asked: fn(&Answers) -> bool) -> Self {
        Self { asked, ..self }
    }

    /// Proposes an answer where no file has one.
    pub(super) const fn proposing(self, answer: &'static str) -> Self {
        let proposed = Proposal::Always(answer);
        Self { proposed, ..self }
    }

    /// Proposes an answer that follows from others where no file has one.
    pub(super) const fn proposing_from(self, answer: fn(&Answers) -> Option<String>) -> Self {
        let proposed = Proposal::From(answer);
        Self { proposed, ..self }
    }

    /// Whether these answers lead to this question.
    pub(super) fn is_asked(&self, answers: &Answers) -> bool {
        (self.asked)(answers)
    }

    /// What may be answered.
    pub(super) fn form(&self) -> Form<'_> {
        match &self.answered_by {
            AnsweredBy::Menu(choices) => Form::Menu(choices),
            AnsweredBy::Typing(typed) => Form::Typed(typed),
        }
    }

    /// The answer to propose: the first of `known` that fits this question, else its own.
    pub(super) fn proposal(&self, answers: &Answers, known: [Option<String>; 2]) -> Option<String> {
        let own = match self.proposed {
            Proposal::Nothing => None,
            Proposal::Always(answer) => Some(answer.to_owned()),
            Proposal::From(answer) => answer(answers),
        };
        let mut fitting = known.into_iter().flatten().filter(|answer| self.takes(answer));
        fitting.next().or(own)
    }

    fn takes(&self, answer: &str) -> bool {
        match self.form() {
            Form::Menu(choices) => choices.iter().any(|choice| choice.value == answer),
            Form::Typed(typed) => typed.check(answer).is_ok(),
        }
    }
}

impl Checks for Typed {
    fn check(&self, answer: &str) -> Result<(), String> {
        if self.is_optional && answer == NONE {
            return Ok(());
        }
        match (Configuration::new().set(self.key, answer), self.is_optional) {
            (Ok(()), _) => Ok(()),
            (Err(ConfigurationError::Value { expected, .. }), true) => Err(format!("expected {expected}, or {NONE}")),
            (Err(ConfigurationError::Value { expected, .. }), false) => Err(format!("expected {expected}")),
            (Err(error), _) => Err(error.to_string()),
        }
    }
}
