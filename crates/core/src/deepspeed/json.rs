//! JSON as DeepSpeed's users write it: with comments, trailing commas and repeated keys.
//!
//! serde_json parses; before it, comments and trailing commas become blanks of the same length, so that its line numbers
//! hold. Its maps would hide repeated keys, hence the tree of our own.

use super::error::{ConfigError, Place};
use super::{Validation, Warning};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Number;
use std::collections::HashMap;
use std::fmt;

/// A JSON value; an object keeps the order of its keys.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Node {
    Null,
    Flag(bool),
    Number(Number),
    Text(String),
    List(Vec<Self>),
    Object(Vec<(String, Self)>),
}

/// Parses a text; of a repeated key the last value remains.
///
/// serde_json refuses more than 128 levels, which bounds every recursion over the tree.
pub(crate) fn parse(
    text: &str,
    file: &str,
    validation: Validation,
    warnings: &mut Vec<Warning>,
) -> Result<Node, ConfigError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut tree: Node = serde_json::from_slice(&plain_json(text)).map_err(|error| {
        let message = error.to_string();
        let end = message.rfind(" at line ").unwrap_or(message.len());
        ConfigError::Syntax {
            file: file.into(),
            line: error.line(),
            column: error.column(),
            message: message[..end].into(),
        }
    })?;
    settle_repeated_keys(&mut tree, &mut Vec::new(), &mut |path, first, last| match validation {
        Validation::Strict => Err(ConfigError::Repeated {
            place: Place {
                file: file.into(),
                path,
            },
            first,
            last,
        }),
        Validation::Lenient => {
            warnings.push(Warning::Repeated { path, first, last });
            Ok(())
        }
    })?;
    Ok(tree)
}

/// Returns a path as messages have it.
pub(crate) fn path_of(keys: &[String]) -> String {
    keys.join(".")
}

/// Replaces comments and trailing commas by blanks.
fn plain_json(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    let (mut at, mut before_last, mut last) = (0, None, None);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let comment = match rest {
            [b'#', ..] | [b'/', b'/', ..] => rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len()),
            // A comment without an end stays, for the parser to name the place.
            [b'/', b'*', tail @ ..] => tail.windows(2).position(|pair| pair == b"*/").map_or(0, |end| end + 4),
            _ => 0,
        };
        if comment > 0 {
            let blanked = bytes[at..at + comment].iter_mut();
            blanked.filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
            at += comment;
            continue;
        }
        let length = if rest[0] == b'"' { string_length(rest) } else { 1 };
        if !rest[0].is_ascii_whitespace() {
            let closes = matches!(rest[0], b'}' | b']');
            if let (true, Some((comma, b',')), Some((_, value))) = (closes, last, before_last)
                && !matches!(value, b',' | b':' | b'[' | b'{')
            {
                bytes[comma] = b' ';
            }
            before_last = last;
            last = Some((at, bytes[at]));
        }
        at += length;
    }
    bytes
}

fn string_length(text: &[u8]) -> usize {
    let mut at = 1;
    while let Some(byte) = text.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    text.len()
}

fn settle_repeated_keys(
    node: &mut Node,
    path: &mut Vec<String>,
    report: &mut impl FnMut(String, String, String) -> Result<(), ConfigError>,
) -> Result<(), ConfigError> {
    match node {
        Node::List(items) => {
            for (index, item) in items.iter_mut().enumerate() {
                path.push(index.to_string());
                settle_repeated_keys(item, path, report)?;
                path.pop();
            }
        }
        Node::Object(entries) => {
            let mut places = HashMap::new();
            let mut settled: Vec<(String, Node)> = Vec::with_capacity(entries.len());
            for (key, mut value) in std::mem::take(entries) {
                path.push(key.clone());
                settle_repeated_keys(&mut value, path, report)?;
                if let Some(place) = places.get(&key).copied() {
                    let entry: &mut (String, Node) = &mut settled[place];
                    report(path_of(path), entry.1.to_string(), value.to_string())?;
                    entry.1 = value;
                } else {
                    places.insert(key.clone(), settled.len());
                    settled.push((key, value));
                }
                path.pop();
            }
            *entries = settled;
        }
        _ => {}
    }
    Ok(())
}

impl Node {
    /// Returns the value at a path of keys.
    pub(super) fn at(&self, path: &str) -> Option<&Self> {
        path.split('.').try_fold(self, |node, key| node.get(key))
    }

    /// Returns the value at a path of keys, to change it.
    pub(super) fn at_mut(&mut self, path: &str) -> Option<&mut Self> {
        path.split('.').try_fold(self, |node, key| {
            let Self::Object(entries) = node else { return None };
            entries.iter_mut().find(|(name, _)| name == key).map(|(_, value)| value)
        })
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Self> {
        let Self::Object(entries) = self else { return None };
        entries.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// Sets a key of an object; other values stay as they are.
    pub(crate) fn set(&mut self, key: &str, value: Self) {
        if let Self::Object(entries) = self {
            match entries.iter_mut().find(|(name, _)| name == key) {
                Some((_, place)) => *place = value,
                None => entries.push((key.into(), value)),
            }
        }
    }

    pub(super) fn remove(&mut self, key: &str) -> Option<Self> {
        let Self::Object(entries) = self else { return None };
        let place = entries.iter().position(|(name, _)| name == key)?;
        Some(entries.remove(place).1)
    }

    pub(super) fn is_auto(&self) -> bool {
        matches!(self, Self::Text(text) if text == "auto")
    }

    pub(crate) fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Null => serde_json::Value::Null,
            Self::Flag(flag) => (*flag).into(),
            Self::Number(number) => number.clone().into(),
            Self::Text(text) => text.as_str().into(),
            Self::List(items) => items.iter().map(Self::to_json).collect(),
            Self::Object(entries) => entries
                .iter()
                .map(|(key, value)| (key.clone(), value.to_json()))
                .collect(),
        }
    }
}

impl fmt::Display for Node {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 80;
        let text = self.to_json().to_string();
        match text.char_indices().nth(LONGEST) {
            Some((end, _)) => write!(formatter, "{}...", &text[..end]),
            None => formatter.write_str(&text),
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Flag(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Number(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Node, E> {
        Ok(Number::from_f64(value).map_or(Node::Null, Node::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Text(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = sequence.next_element()? {
            items.push(item);
        }
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Node::Object(entries))
    }
}
