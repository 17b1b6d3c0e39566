//! YAML as far as trackers write it: maps in blocks, everything else as JSON, which YAML contains.

use serde_json::{Map, Value};
use std::fmt::Write as _;

/// Returns a document with one block for each map.
pub(super) fn document(map: &Map<String, Value>) -> String {
    let mut text = String::new();
    write_map(map, 0, &mut text);
    if text.is_empty() { "{}\n".into() } else { text }
}

fn write_map(map: &Map<String, Value>, depth: usize, text: &mut String) {
    for (key, value) in map {
        let plain = key.starts_with(|first: char| first.is_ascii_alphabetic())
            && key
                .chars()
                .all(|character| character.is_ascii_alphanumeric() || "_-".contains(character))
            // Words that YAML takes for something else than text.
            && !["y", "n", "yes", "no", "on", "off", "true", "false", "null"].contains(&&*key.to_lowercase());
        let key = if plain {
            key.clone()
        } else {
            Value::from(key.as_str()).to_string()
        };
        // Writing to a string cannot fail.
        let _ = match value {
            Value::Object(inner) if !inner.is_empty() => {
                let _ = writeln!(text, "{:depth$}{key}:", "");
                write_map(inner, depth + 2, text);
                Ok(())
            }
            Value::Number(number) => writeln!(text, "{:depth$}{key}: {}", "", readable(&number.to_string())),
            other => writeln!(text, "{:depth$}{key}: {other}", ""),
        };
    }
}

/// Readers of YAML 1.1, of which PyYAML is one, take `5e-5` for text: they need a dot and a sign.
fn readable(number: &str) -> String {
    let Some((digits, exponent)) = number.split_once('e') else {
        return number.into();
    };
    let dot = if digits.contains('.') { "" } else { ".0" };
    let sign = if exponent.starts_with(['-', '+']) { "" } else { "+" };
    format!("{digits}{dot}e{sign}{exponent}")
}
