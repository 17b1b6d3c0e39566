//! Reads the documents of a text file.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use serde_json::Value;

/// Reads a file of text as a list of documents: one for plain text, one a line for JSON lines (`.jsonl`, `.json`).
///
/// # Errors
/// If the file cannot be read or is not UTF-8, or a line is not a JSON object with a text in `text`; the error names
/// file and line.
pub(super) fn read_documents(path: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("{}: cannot be read, expected UTF-8 text or JSON lines", path.display()))?;
    if path
        .extension()
        .is_some_and(|extension| extension == "jsonl" || extension == "json")
    {
        json_lines(&text, path)
    } else {
        Ok(vec![text])
    }
}

fn json_lines(text: &str, path: &Path) -> Result<Vec<String>> {
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
        .map(|(index, line)| {
            document_of_line(line).with_context(|| {
                format!(
                    "{}, line {}: expected a JSON object such as {{\"text\": \"...\"}}",
                    path.display(),
                    index + 1
                )
            })
        })
        .collect()
}

fn document_of_line(line: &str) -> Result<String> {
    let Value::Object(mut fields) = serde_json::from_str(line)? else {
        bail!("the line is JSON and no object");
    };
    match fields.remove("text") {
        Some(Value::String(text)) => Ok(text),
        Some(other) => bail!("`text` is {other}, expected a string"),
        None => bail!("the object has no `text`"),
    }
}
