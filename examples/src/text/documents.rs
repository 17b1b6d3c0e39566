//! Reads the documents of a text file.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use sconce_core::data::JsonLines;
use serde::Deserialize;
use serde_json::Value;

/// A line of a file of JSON lines.
#[derive(Clone, Deserialize)]
#[serde(try_from = "Value")]
struct Document(String);

impl TryFrom<Value> for Document {
    type Error = String;

    fn try_from(line: Value) -> Result<Self, String> {
        let reason = match line {
            Value::Object(mut fields) => match fields.remove("text") {
                Some(Value::String(text)) => return Ok(Self(text)),
                Some(other) => format!("`text` is {other}, expected a string"),
                None => "the object has no `text`".to_owned(),
            },
            _ => "the line is JSON and no object".to_owned(),
        };
        Err(format!(
            "{reason}; expected a JSON object such as {{\"text\": \"...\"}}"
        ))
    }
}

/// Reads a file of text as a list of documents: one for plain text, one a line for JSON lines (`.jsonl`, `.json`).
///
/// # Errors
/// If the file cannot be read or is not UTF-8, or a line is not a JSON object with a text in `text`; the error names
/// file and line.
pub(super) fn read_documents(path: &Path) -> Result<Vec<String>> {
    if path
        .extension()
        .is_some_and(|extension| extension == "jsonl" || extension == "json")
    {
        let documents = JsonLines::<Document>::open([path]).and_then(|lines| lines.read_all());
        let documents = documents.map_err(|error| anyhow!(error))?;
        return Ok(documents.into_iter().map(|document| document.0).collect());
    }
    let text = fs::read_to_string(path)
        .with_context(|| format!("{}: cannot be read, expected UTF-8 text or JSON lines", path.display()))?;
    Ok(vec![text])
}
