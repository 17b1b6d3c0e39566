//! What a rank has left in its error file: the error in its own words, in torchrun's format.

use std::fs;
use std::path::Path;

use serde_json::Value;

/// How much of a file is read, in bytes: it is a message, with a backtrace.
const MOST_BYTES: usize = 1 << 20;
/// How much of a message is told, in characters.
const MOST_CHARACTERS: usize = 4000;

/// Reads the error that a rank has left at `path`; `None` if it has left none that can be read.
pub(super) fn read(path: &Path) -> Option<String> {
    if fs::metadata(path).ok()?.len() > MOST_BYTES as u64 {
        return None;
    }
    let content: Value = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let message = &content["message"];
    // Either a text, or an object that holds one beside a backtrace and a time.
    let text = message.as_str().or_else(|| message["message"].as_str())?.trim();
    let text = String::from_iter(text.chars().take(MOST_CHARACTERS));
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_of_torchs_formats_are_read_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("error.json");
        assert_eq!(read(&path), None);
        // As torch 2.11's `record_exception` writes it.
        let recorded = r#"{"message": {"message": "ValueError: no data", "extraInfo":
            {"py_callstack": "Traceback ...", "timestamp": "1764608400"}}}"#;
        for (content, expected) in [
            (recorded, Some("ValueError: no data")),
            (r#"{"message": "out of memory"}"#, Some("out of memory")),
            (r#"{"message": ""}"#, None),
            (r#"{"message": {"text": 1}}"#, None),
            (r#"{"message": "cut"#, None),
            ("", None),
        ] {
            fs::write(&path, content).unwrap();
            assert_eq!(read(&path).as_deref(), expected, "{content}");
        }
    }
}
