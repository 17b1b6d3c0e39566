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
        let _ = self
            .output
            .write_all(text.as_bytes())
            .and_then(|()| self.output.flush());
    }

    /// The next line without blanks around it.
    fn read(&mut self, question: &str) -> Result<String, CommandError> {
        let unread =
            |reason: io::Error| CommandError::failure(format!("cannot read an answer: {reason}; nothing was written"));
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
            for (number, choice) in numbered(choices) {
                question += &format!("  {number}) {}\n", choice.label);
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

/// The choices with the numbers by which people choose them: their values where these are numbers, else from 1.
fn numbered(choices: &[Choice]) -> Vec<(String, &Choice)> {
    let are_numbers = choices.iter().all(|choice| choice.value.parse::<u64>().is_ok());
    let number = |index: usize, choice: &Choice| match are_numbers {
        true => choice.value.to_owned(),
        false => (index + 1).to_string(),
    };
    choices
        .iter()
        .enumerate()
        .map(|(index, choice)| (number(index, choice), choice))
        .collect()
}

fn number_of(choices: &[Choice], value: &str) -> String {
    let mut numbered = numbered(choices).into_iter();
    let found = numbered.find(|(_, choice)| choice.value == value);
    found.map_or_else(|| shown(value), |(number, _)| number)
}

/// Finds the choice of this number, value, or only beginning of a value or label.
fn chosen(choices: &[Choice], line: &str) -> Result<String, String> {
    let numbered = numbered(choices);
    let by_number = numbered
        .iter()
        .find(|(number, _)| number == line)
        .map(|(_, choice)| *choice);
    let by_value = || choices.iter().find(|choice| choice.value.eq_ignore_ascii_case(line));
    let begins = |text: &str| {
        text.get(..line.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(line))
    };
    let by_beginning = || {
        let mut fitting = choices
            .iter()
            .filter(|choice| begins(choice.value) || begins(choice.label));
        fitting.next().filter(|_| !line.is_empty() && fitting.next().is_none())
    };
    let found = by_number.or_else(by_value).or_else(by_beginning);
    found.map(|choice| choice.value.to_owned()).ok_or_else(|| {
        let numbers = Vec::from_iter(numbered.into_iter().map(|(number, _)| number)).join(", ");
        format!("expected one of {numbers}, or how a choice begins")
    })
}

#[cfg(test)]
mod tests {
    use super::super::question::choice;
    use super::*;

    #[test]
    fn choices_are_taken_by_number_value_or_beginning() {
        let yes_or_no = [choice("true", "yes"), choice("false", "no")];
        let names = [
            choice("NO_SHARD", "NO_SHARD: nothing"),
            choice("NO_WRAP", "NO_WRAP: none"),
        ];
        let stages = [choice("0", "nothing"), choice("1", "some"), choice("2", "all")];
        for (choices, line, expected) in [
            (&yes_or_no[..], "1", "true"),
            (&yes_or_no, "n", "false"),
            (&yes_or_no, "YES", "true"),
            (&yes_or_no, "False", "false"),
            (&names, "2", "NO_WRAP"),
            (&names, "no_sh", "NO_SHARD"),
            // A stage's number is its own, whatever its place is.
            (&stages, "2", "2"),
            (&stages, "0", "0"),
        ] {
            assert_eq!(chosen(choices, line).as_deref(), Ok(expected), "{line}");
        }
        for (choices, line) in [
            (&names[..], "no_"),
            (&names, ""),
            (&names, "3"),
            (&stages, "3"),
            (&yes_or_no, "ü"),
        ] {
            assert!(chosen(choices, line).is_err(), "{line}");
        }
        assert_eq!(number_of(&stages, "2"), "2");
        assert_eq!(number_of(&names, "NO_WRAP"), "2");
    }
}
