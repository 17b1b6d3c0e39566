//! YAML as people and PyYAML write it, into a tree with lines.
//!
//! Plain `yes`, `no`, `on` and `off` stay text: what a key's kind makes of them is decided where the key is known.
//! Aliases and merges are followed within a budget, so that a small text cannot become a large tree.

use super::ConfigurationError;
use super::document::Placed;
use crate::deepspeed::Node;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Number;
use serde_saphyr::{DuplicateKeyPolicy, Spanned, budget, options};
use std::fmt;

const FORMAT: &str = "YAML";

pub(super) fn parse(text: &str, file: &str) -> Result<Placed, ConfigurationError> {
    let options = options! {
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        strict_booleans: true,
        with_snippet: false,
        budget: budget! {
            max_nodes: 100_000,
            max_events: 300_000,
            max_aliases: 1_000,
            max_documents: 2,
        },
    };
    // An empty text, or one of comments only, says nothing.
    if text
        .lines()
        .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
    {
        return Ok(Placed::Object(Vec::new()));
    }
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let at = error.location().filter(|at| at.line() > 0);
        let message = error.to_string();
        // The place stands in front of ours.
        let end = message.find(" at line ").unwrap_or(message.len());
        ConfigurationError::Syntax {
            file: file.into(),
            at: at.map(|at| (at.line() as usize, at.column() as usize)),
            message: message[..end].lines().next().unwrap_or_default().into(),
            format: FORMAT,
        }
    })
}

impl<'de> Deserialize<'de> for Placed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PlacedVisitor)
    }
}

struct PlacedVisitor;

impl<'de> Visitor<'de> for PlacedVisitor {
    type Value = Placed;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(FORMAT)
    }

    fn visit_unit<E>(self) -> Result<Placed, E> {
        Ok(Placed::Scalar(Node::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Placed, E> {
        Ok(Placed::Scalar(Node::Flag(value)))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Placed, E> {
        Ok(Placed::Scalar(Node::Number(value.into())))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Placed, E> {
        Ok(Placed::Scalar(Node::Number(value.into())))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Placed, E> {
        let number = Number::from_f64(value).map(Node::Number);
        Ok(Placed::Scalar(number.unwrap_or_else(|| Node::Text(value.to_string()))))
    }

    fn visit_str<E>(self, value: &str) -> Result<Placed, E> {
        Ok(Placed::Scalar(Node::Text(value.into())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Placed, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = sequence.next_element()? {
            items.push(item);
        }
        Ok(Placed::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Placed, A::Error> {
        let mut entries = Vec::new();
        while let Some((key, value)) = map.next_entry::<Spanned<String>, Placed>()? {
            let line = key.referenced.line() as usize;
            entries.push((key.value, line, value));
        }
        Ok(Placed::Object(entries))
    }
}
