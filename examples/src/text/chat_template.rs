//! Turns a conversation into the text that a model was trained on, by the template in its folder.
//!
//! Templates are Jinja, written for Python and downloaded with the model: input from strangers. They run in `minijinja`, which
//! reaches no files and calls nothing but what is given here, with a limit on how much they may do.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize as _;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter, Serializer};

/// A message of a conversation: an object with `role` and `content`, and whatever else its template reads.
pub type Message = serde_json::Map<String, serde_json::Value>;

const TEMPLATE_FILE: &str = "chat_template.jinja";
const NAME: &str = "chat template";

/// Steps of the template engine for one conversation: some ten thousand are usual.
const FUEL: u64 = 5_000_000;

/// The chat template of a model.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token` and its relatives, as text.
    special_tokens: BTreeMap<String, String>,
    /// Where the template stands, for messages.
    origin: String,
}

impl ChatTemplate {
    /// Finds the template of a model: `chat_template.jinja`, else `chat_template` of `tokenizer_config.json` (of several that
    /// with the name `default`). `special_tokens` are what the template knows by names such as `bos_token`.
    ///
    /// # Errors
    /// If there is one and it cannot be read or parsed; the error names file and line.
    pub fn find(directory: &Path, special_tokens: BTreeMap<String, String>) -> Result<Option<Self>> {
        let file = directory.join(TEMPLATE_FILE);
        if file.is_file() {
            let text = fs::read_to_string(&file).with_context(|| format!("{}: cannot be read", file.display()))?;
            return Self::parse(&text, file.display().to_string(), special_tokens).map(Some);
        }
        let file = directory.join("tokenizer_config.json");
        if !file.is_file() {
            return Ok(None);
        }
        let Some(text) = template_in(&file)? else {
            return Ok(None);
        };
        let origin = format!("{}, chat_template", file.display());
        Self::parse(&text, origin, special_tokens).map(Some)
    }

    /// Parses a template; `origin` says in messages where it stands.
    ///
    /// # Errors
    /// If it is no template; the error names the line.
    pub fn parse(text: &str, origin: String, special_tokens: BTreeMap<String, String>) -> Result<Self> {
        let mut environment = Environment::new();
        // As transformers renders: `{% %}` leaves no lines behind.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", to_json);
        environment
            .add_template_owned(NAME, without_generation_tags(text))
            .map_err(|error| worded(&origin, &error))?;
        Ok(Self {
            environment,
            special_tokens,
            origin,
        })
    }

    /// Renders a conversation; with `add_generation_prompt` it ends where the assistant is to begin.
    ///
    /// `strftime_now` is not defined: the same conversation is the same text on every day.
    ///
    /// # Errors
    /// If the template refuses the conversation, calls what is not there, or does too much; the error names its line.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let render = || -> Result<String, Error> {
            let template = self.environment.get_template(NAME)?;
            let mut context = BTreeMap::from_iter(
                self.special_tokens
                    .iter()
                    .map(|(name, token)| (name.as_str(), Value::from(token.as_str()))),
            );
            context.insert("messages", Value::from_serialize(messages));
            context.insert("add_generation_prompt", Value::from(add_generation_prompt));
            context.insert("tools", Value::from(()));
            context.insert("documents", Value::from(()));
            template.render(context)
        };
        render().map_err(|error| worded(&self.origin, &error))
    }
}

fn template_in(file: &PathBuf) -> Result<Option<String>> {
    use serde_json::Value as Json;
    let read = || -> Result<Option<String>> {
        let config: Json = serde_json::from_str(&fs::read_to_string(file)?)?;
        match config.get("chat_template") {
            None | Some(Json::Null) => Ok(None),
            Some(Json::String(text)) => Ok(Some(text.clone())),
            Some(Json::Array(named)) => {
                let default = named.iter().find(|one| one["name"] == "default");
                let text = default.and_then(|one| one["template"].as_str());
                let text = text.context("`chat_template` is a list without a template named \"default\"")?;
                Ok(Some(text.to_owned()))
            }
            Some(_) => bail!("`chat_template` is neither text nor a list of named templates"),
        }
    };
    read().with_context(|| format!("{}: cannot be used", file.display()))
}

fn worded(origin: &str, error: &Error) -> anyhow::Error {
    let line = error.line().map_or(String::new(), |line| format!(", line {line}"));
    let detail = error.detail().map_or(String::new(), |detail| format!(": {detail}"));
    anyhow!("{origin}{line}: {}{detail}", error.kind())
}

/// What templates call on conversations that they do not take.
fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// Python's `json.dumps(value, ensure_ascii=False)`, with its spaces.
fn to_json(value: &Value, arguments: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = arguments.get("indent")?;
    let refused = |error: &dyn std::fmt::Display| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut text = Vec::new();
    let written = match indent {
        Some(indent) => {
            let indent = " ".repeat(indent.min(64));
            value.serialize(&mut Serializer::with_formatter(
                &mut text,
                PrettyFormatter::with_indent(indent.as_bytes()),
            ))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut text, Spaced(CompactFormatter))),
    };
    written.map_err(|error| refused(&error))?;
    String::from_utf8(text).map_err(|error| refused(&error))
}

/// JSON with a space after commas and colons.
struct Spaced(CompactFormatter);

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        let _ = &self.0;
        writer.write_all(b": ")
    }
}

/// Makes `{% generation %}`, a tag of transformers' own around what an assistant said, a block that is always rendered: which
/// part is learnt is found out by rendering.
fn without_generation_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let (before, tag) = (&rest[..start], &rest[start..start + length]);
        let inner = tag[2..].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let replacement = match inner {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        out.push_str(before);
        match replacement {
            Some(replacement) => out.push_str(&tag.replacen(inner, replacement, 1)),
            None => out.push_str(tag),
        }
        rest = &rest[start + length..];
    }
    out + rest
}
