//! Questions as menus and fields on a terminal.

use std::fmt;

use inquire::ui::{RenderConfig, Styled};
use inquire::validator::Validation;
use inquire::{InquireError, Select, Text};

use super::ask::{Ask, Form, Prompt, Reply};
use super::question::Choice;
use crate::command_error::CommandError;
use crate::terminal::{shown, tell, wants_colour};

const MENU_KEYS: &str = "arrows move, Enter chooses, Esc goes back, Ctrl-C quits";
const FIELD_KEYS: &str = "Enter takes it, Esc goes back, Ctrl-C quits";
/// More than any menu has, so that none scrolls.
const MOST_CHOICES: usize = 12;

/// Draws menus on stderr and reads keys from stdin, which must both be terminals.
#[derive(Debug)]
pub(super) struct Menus {
    look: RenderConfig<'static>,
}

impl Menus {
    pub(super) fn new() -> Self {
        let look = if wants_colour(&std::io::stderr()) {
            RenderConfig::default_colored()
        } else {
            RenderConfig::empty()
        };
        // Esc goes back here, which is no end.
        let gone_back = Styled::new("<back>");
        Self {
            look: look.with_canceled_prompt_indicator(gone_back),
        }
    }
}

impl Ask for Menus {
    fn ask(&mut self, prompt: &Prompt<'_>) -> Result<Reply, CommandError> {
        let answer = match prompt.form {
            Form::Menu(choices) => {
                let start = choices.iter().position(|choice| Some(choice.value) == prompt.default);
                let menu = Select::new(prompt.text, choices.iter().map(Label).collect())
                    .with_starting_cursor(start.unwrap_or(0))
                    .with_page_size(MOST_CHOICES)
                    .with_help_message(MENU_KEYS)
                    .with_formatter(&|chosen| chosen.value.0.short().to_owned())
                    .with_render_config(self.look)
                    .without_filtering();
                menu.prompt().map(|Label(choice)| choice.value.to_owned())
            }
            Form::Typed(typed) => {
                let check = move |text: &str| match typed.check(text.trim()) {
                    Ok(()) => Ok(Validation::Valid),
                    Err(expected) => Ok(Validation::Invalid(expected.into())),
                };
                let default = prompt.default.map(shown);
                let mut field = Text::new(prompt.text)
                    .with_help_message(FIELD_KEYS)
                    .with_render_config(self.look)
                    .with_validator(check);
                field.default = default.as_deref();
                field.prompt().map(|text| text.trim().to_owned())
            }
        };
        match answer {
            Ok(answer) => Ok(Reply::Answer(answer)),
            Err(InquireError::OperationCanceled) => Ok(Reply::Back),
            Err(InquireError::OperationInterrupted) => Ok(Reply::Quit),
            Err(reason) => Err(CommandError::failure(format!(
                "the terminal gives no answer: {reason}; nothing was written"
            ))),
        }
    }

    fn tell(&mut self, text: &str) {
        tell(text);
    }
}

/// A choice as a menu shows it.
struct Label<'a>(&'a Choice);

impl fmt::Display for Label<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.0.label)
    }
}
