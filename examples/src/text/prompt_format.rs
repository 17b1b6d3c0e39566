//! How samples become text: by the model's chat template, or as Alpaca wrote them.

use std::ops::Range;

use anyhow::{Context as _, Result, bail};

use super::chat_template::{ChatTemplate, Message};
use super::sample::{Sample, is_of_assistant, message};

/// What turns questions and answers into text.
#[derive(Debug)]
pub enum PromptFormat {
    /// The model's own template.
    Template(Box<ChatTemplate>),
    /// The text of Stanford's Alpaca, for models without a template.
    Alpaca,
}

/// Text to learn from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MarkedText {
    /// The text.
    pub text: String,
    /// The parts of it that are learnt, as bytes of the text, in order.
    pub learnt: Vec<Range<usize>>,
    /// Whether the text holds its special tokens itself; else the tokenizer's go around it.
    pub has_special_tokens: bool,
}

impl PromptFormat {
    /// Writes a sample as text, and says what of it is learnt: the answers, or all of plain text.
    ///
    /// # Errors
    /// If the template refuses it, or writes a conversation so that its parts cannot be told apart; a chat without a template.
    pub fn write(&self, sample: &Sample) -> Result<MarkedText> {
        if let Sample::Text(text) = sample {
            return Ok(MarkedText {
                learnt: std::iter::once(0..text.len()).collect(),
                text: text.clone(),
                has_special_tokens: false,
            });
        }
        match (self, sample) {
            (Self::Template(template), sample) => {
                let messages = sample.messages().unwrap_or_default();
                let (text, learnt) = render(template, &messages)?;
                Ok(MarkedText {
                    text,
                    learnt,
                    has_special_tokens: true,
                })
            }
            (
                Self::Alpaca,
                Sample::Instruction {
                    instruction,
                    input,
                    output,
                },
            ) => {
                let prompt = alpaca(instruction, input);
                let text = format!("{prompt}{output}");
                Ok(MarkedText {
                    learnt: std::iter::once(prompt.len()..text.len()).collect(),
                    text,
                    has_special_tokens: false,
                })
            }
            (Self::Alpaca, _) => bail!(
                "is a conversation, and the model folder has no chat template: put chat_template.jinja or a \
                 tokenizer_config.json with one into it, or give data with `instruction` and `output`"
            ),
        }
    }

    /// Writes a question, up to where the answer begins; also says whether the text holds its special tokens itself.
    ///
    /// # Errors
    /// If the template refuses it.
    pub fn ask(&self, question: &str) -> Result<(String, bool)> {
        match self {
            Self::Template(template) => Ok((template.render(&[message("user", question)], true)?, true)),
            Self::Alpaca => Ok((alpaca(question, ""), false)),
        }
    }
}

/// The prompts of <https://github.com/tatsu-lab/stanford_alpaca>.
fn alpaca(instruction: &str, input: &str) -> String {
    match input {
        "" => format!(
            "Below is an instruction that describes a task. Write a response that appropriately completes the \
             request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
        ),
        input => format!(
            "Below is an instruction that describes a task, paired with an input that provides further context. Write \
             a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### \
             Input:\n{input}\n\n### Response:\n"
        ),
    }
}

/// Renders a conversation, and finds what assistants say in it: what stands between the rendering of all messages before, ready
/// for an answer, and the end of the rendering with it.
fn render(template: &ChatTemplate, messages: &[Message]) -> Result<(String, Vec<Range<usize>>)> {
    let whole = template.render(messages, false)?;
    let mut learnt = Vec::new();
    for (number, message) in messages.iter().enumerate() {
        if !is_of_assistant(message) {
            continue;
        }
        let what = || format!("message {number} cannot be told apart in the text of the chat template");
        let before = template.render(&messages[..number], true)?;
        let with = template.render(&messages[..=number], false)?;
        let start = answer_start(&whole, &before, &with).with_context(what)?;
        let end = answer_end(&whole, start, &with, message).with_context(what)?;
        learnt.push(start..end);
    }
    Ok((whole, learnt))
}

/// A template may open an answer otherwise in a prompt than in a conversation (an empty thought, say): the answer begins
/// where the texts part, if all messages before are in both.
fn answer_start(whole: &str, before: &str, with: &str) -> Option<usize> {
    if whole.starts_with(before) {
        return Some(before.len());
    }
    let common = |a: &str, b: &str| {
        let pairs = a.char_indices().zip(b.chars());
        let same = pairs.take_while(|((_, a), b)| a == b).last();
        same.map_or(0, |((place, a), _)| place + a.len_utf8())
    };
    let shared = common(whole, before);
    // Nearly all of the prompt: it parts in its last line only.
    let last_line = before.trim_end().rfind('\n').map_or(0, |place| place + 1);
    (shared >= last_line && common(with, before) >= last_line).then_some(shared)
}

/// A template may write an answer otherwise when more messages follow (without its thought, say): then its content and what
/// follows that are looked for.
fn answer_end(whole: &str, start: usize, with: &str, message: &Message) -> Option<usize> {
    if whole.starts_with(with) {
        return Some(with.len());
    }
    let content = message.get("content")?.as_str()?.trim();
    let spoken = content.rsplit("</think>").next().unwrap_or(content).trim();
    let tail = &with[with.rfind(spoken)? + spoken.len()..];
    let end = start + whole[start..].find(spoken)? + spoken.len();
    whole[end..].starts_with(tail).then_some(end + tail.len())
}
