//! One line of training data, in whichever of the usual forms it is.

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::chat_template::Message;

/// What a line of JSON, or a row of Parquet, holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Sample {
    /// `{"text": ..}`: all of it is learnt.
    Text(String),
    /// `{"instruction": .., "input": .., "output": ..}`, as in Stanford's Alpaca; `input` may be missing or empty.
    Instruction {
        /// What is asked.
        instruction: String,
        /// What it is asked about.
        input: String,
        /// The answer, which is learnt.
        output: String,
    },
    /// `{"messages": [{"role": .., "content": ..}, ..]}`, or `{"conversations": [{"from": .., "value": ..}, ..]}` as ShareGPT
    /// writes it: what assistants say is learnt.
    Chat(Vec<Message>),
}

/// [`Sample`] as serde reads it, with an error that says what was expected.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "Value")]
pub(super) struct SampleLine(pub(super) Sample);

impl TryFrom<Value> for SampleLine {
    type Error = String;

    fn try_from(line: Value) -> Result<Self, String> {
        Sample::from_json(line).map(Self).map_err(|error| format!("{error:#}"))
    }
}

impl Sample {
    /// Reads a line.
    ///
    /// # Errors
    /// If it is none of the forms; the error says what it lacks.
    pub fn from_json(line: Value) -> Result<Self> {
        let Value::Object(mut fields) = line else {
            bail!("the line is JSON and no object; expected a JSON object such as {{\"text\": \"...\"}}")
        };
        if let Some(messages) = fields.remove("messages") {
            return chat(messages, Ok).context("`messages`");
        }
        if let Some(turns) = fields.remove("conversations") {
            return chat(turns, of_share_gpt).context("`conversations`");
        }
        if fields.contains_key("instruction") {
            let mut text = |name: &str| match fields.remove(name) {
                None | Some(Value::Null) => Ok(None),
                Some(Value::String(text)) => Ok(Some(text)),
                Some(other) => bail!("`{name}` is {other}, expected a string"),
            };
            let output = text("output")?.context("the object has `instruction` and no `output`")?;
            return Ok(Self::Instruction {
                instruction: text("instruction")?.context("`instruction` is null, expected a string")?,
                input: text("input")?.unwrap_or_default(),
                output,
            });
        }
        match fields.remove("text") {
            Some(Value::String(text)) => Ok(Self::Text(text)),
            Some(other) => {
                bail!("`text` is {other}, expected a string; expected a JSON object such as {{\"text\": \"...\"}}")
            }
            None => bail!(
                "the object has no `text`; expected a JSON object such as {{\"text\": \"...\"}}, \
                 {{\"instruction\": \"...\", \"output\": \"...\"}} or {{\"messages\": [...]}}"
            ),
        }
    }

    /// Returns the conversation that this is, for a chat template; `None` for plain text.
    pub(super) fn messages(&self) -> Option<Vec<Message>> {
        match self {
            Self::Text(_) => None,
            Self::Instruction {
                instruction,
                input,
                output,
            } => {
                let asked = match input.as_str() {
                    "" => instruction.clone(),
                    input => format!("{instruction}\n\n{input}"),
                };
                Some(vec![message("user", &asked), message("assistant", output)])
            }
            Self::Chat(messages) => Some(messages.clone()),
        }
    }
}

/// Returns a message of plain text.
pub(super) fn message(role: &str, content: &str) -> Message {
    Map::from_iter([("role".into(), role.into()), ("content".into(), content.into())])
}

fn chat(turns: Value, read: impl Fn(Message) -> Result<Message>) -> Result<Sample> {
    let Value::Array(turns) = turns else {
        bail!("is {turns}, expected a list of messages")
    };
    let mut messages = Vec::with_capacity(turns.len());
    for (number, turn) in turns.into_iter().enumerate() {
        let Value::Object(turn) = turn else {
            bail!("message {number} is {turn}, expected an object")
        };
        let message = read(turn).with_context(|| format!("message {number}"))?;
        ensure!(
            message.get("role").is_some_and(Value::is_string),
            "message {number} has no `role`, expected \"system\", \"user\" or \"assistant\""
        );
        ensure!(
            message.contains_key("content") || message.contains_key("tool_calls"),
            "message {number} has no `content`"
        );
        messages.push(message);
    }
    ensure!(
        messages.iter().any(is_of_assistant),
        "no message is an assistant's, so that there is nothing to learn"
    );
    Ok(Sample::Chat(messages))
}

pub(super) fn is_of_assistant(message: &Message) -> bool {
    message.get("role").is_some_and(|role| role == "assistant")
}

fn of_share_gpt(turn: Message) -> Result<Message> {
    let text = |name: &str| {
        let value = turn.get(name).and_then(Value::as_str);
        value.with_context(|| format!("`{name}` is missing or no string"))
    };
    let role = match text("from")? {
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "model" => "assistant",
        other => other,
    };
    Ok(message(role, text("value")?))
}
