//! Questions and answers as lines, for a plain pipe and for terminals that cannot draw menus.

use std::io::{self, BufRead, Read as _, Write};

use super::ask::{Ask, Form, Prompt, Reply};
use super::question::Choice;
use crate::command_error::CommandError;
use crate::terminal::shown;

/// The most bytes of a line that are read.
const LONGEST: u64 = 1 << 16;

const INTRODUCTION: &str = "\
Each question is answered by a line: the number or name of a choice, or a value; an empty line takes what stands in [].
`back` goes back by a question, `quit` ends without writing anything.
";

/// Reads an answer a line, and writes each question with its choices.
#[derive(Debug)]
pub(super) struct Lines<Input, Output> {
    input: Input,
    output: Output,
    /// Whether answers are written too, since nobody else shows them.
    echoes: bool,
}

impl<Input: BufRead, Output: Write> Lines<Input, Output> {
    pub(super) fn new(input: Input, output: Output, echoes: bool) -> Self {
        let mut lines = Self { input, output, echoes };
        lines.write(INTRODUCTION);
        lines
    }

    /// That nobody reads the questions is no reason to stop.
    fn write(&mut self, text: &str) {
        let _ = self.output.write_all(text.as_bytes()).and_then(|()| self.output.flush());
    }

    /// The next line without blanks around it.
    fn read(&mut self, question: &str) -> Result<String, CommandError> {
        let unread = |reason: io::Error| CommandError::failure(format!("cannot read an answer: {reason}; nothing was written"));
        let mut line = String::new();
        let read = self.input.by_ref().take(LONGEST).read_line(&mut line).map_err(unread)?;
        if read == 0 {
            return Err(CommandError::failure(format!(
                "the input ended at the question {question:?}; nothing was written"
            ))
            .hint("a file without questions: sconce config default, and flags of sconce launch"));
        }
        if self.echoes {
            self.write(&format!("{}\n", shown(line.trim_end())));
        }
        Ok(line.trim().to_owned())
    }
}

impl<Input: BufRead, Output: Write> Ask for Lines<Input, Output> {
    fn ask(&mut self, prompt: &Prompt<'_>) -> Result<Reply, CommandError> {
        let mut question = format!("\n{}\n", prompt.text);
        if let Form::Menu(choices) = prompt.form {
            for (index, choice) in choices.iter().enumerate() {
                question += &format!("  {}) {}\n", index + 1, choice.label);
            }
        }
        let default = prompt.default.map(|default| match prompt.form {
            Form::Menu(choices) => number_of(choices, default),
            Form::Typed(_) => shown(default),
        });
        question += &default.map_or_else(|| "> ".to_owned(), |default| format!("[{default}] > "));
        loop {
            self.write(&question);
            let line = self.read(prompt.text)?;
            let answer = match (line.as_str(), prompt.default) {
                ("back", _) => return Ok(Reply::Back),
                ("quit", _) => return Ok(Reply::Quit),
                ("", Some(default)) => Ok(default.to_owned()),
                (line, _) => match prompt.form {
                    Form::Menu(choices) => chosen(choices, line),
                    Form::Typed(typed) => typed.check(line).map(|()| line.to_owned()),
                },
            };
            match answer {
                Ok(answer) => return Ok(Reply::Answer(answer)),
                Err(expected) => self.write(&format!("{:?}: {expected}\n", shown(&line))),
            }
        }
    }

    fn tell(&mut self, text: &str) {
        self.write(text);
    }
}

/// The number by which people choose a value.
fn number_of(choices: &[Choice], value: &str) -> String {
    let index = choices.iter().position(|choice| choice.value == value);
    index.map_or_else(|| shown(value), |index| (index + 1).to_string())
}

fn chosen(choices: &[Choice], line: &str) -> Result<String, String> {
    // A name comes first: stages of ZeRO are numbers.
    let named = choices.iter().find(|choice| {
        let label = choice.label.split_once(':').map_or(choice.label, |(name, _)| name);
        choice.value.eq_ignore_ascii_case(line) || label.eq_ignore_ascii_case(line)
    });
    let numbered = || line.parse::<usize>().ok().and_then(|number| choices.get(number.checked_sub(1)?));
    match named.or_else(numbered) {
        Some(choice) => Ok(choice.value.to_owned()),
        None => {
            let names = Vec::from_iter(choices.iter().map(|choice| choice.value)).join(", ");
            Err(format!("expected a number from 1 to {}, or one of {names}", choices.len()))
        }
    }
}
