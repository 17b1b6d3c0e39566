//! TOML into a tree with lines.

use super::ConfigurationError;
use super::document::Placed;
use crate::deepspeed::Node;
use serde_json::Number;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

pub(super) fn parse(text: &str, file: &str) -> Result<Placed, ConfigurationError> {
    let lines = Lines::new(text);
    match DeTable::parse(text) {
        Ok(table) => Ok(object(table.into_inner(), &lines)),
        Err(error) => Err(ConfigurationError::Syntax {
            file: file.into(),
            at: error.span().map(|span| lines.at(span.start)),
            message: error.message().into(),
            format: "TOML",
        }),
    }
}

fn object(table: DeTable<'_>, lines: &Lines) -> Placed {
    let mut entries = Vec::from_iter(table.into_iter().map(|(key, value)| {
        let start = key.span().start;
        (start, key.into_inner().into_owned(), value)
    }));
    entries.sort_by_key(|(start, ..)| *start);
    let entries = entries.into_iter().map(|(start, key, value)| {
        let (line, _) = lines.at(start);
        (key, line, placed(value.into_inner(), lines))
    });
    Placed::Object(entries.collect())
}

fn placed(value: DeValue<'_>, lines: &Lines) -> Placed {
    let text = |text: &str| Placed::Scalar(Node::Text(text.into()));
    match value {
        DeValue::String(value) => text(&value),
        DeValue::Boolean(flag) => Placed::Scalar(Node::Flag(flag)),
        DeValue::Integer(value) => match i64::from_str_radix(value.as_str(), value.radix()) {
            Ok(number) => Placed::Scalar(Node::Number(number.into())),
            Err(_) => text(value.as_str()),
        },
        DeValue::Float(value) => match value.as_str().parse().ok().and_then(Number::from_f64) {
            Some(number) => Placed::Scalar(Node::Number(number)),
            None => text(value.as_str()),
        },
        DeValue::Datetime(value) => text(&value.to_string()),
        DeValue::Array(items) => {
            let items = items.into_iter().map(Spanned::into_inner);
            Placed::List(items.map(|item| placed(item, lines)).collect())
        }
        DeValue::Table(table) => object(table, lines),
    }
}

/// Where lines begin.
struct Lines(Vec<usize>);

impl Lines {
    fn new(text: &str) -> Self {
        let ends = text.match_indices('\n').map(|(end, _)| end + 1);
        Self(std::iter::once(0).chain(ends).collect())
    }

    /// Returns line and column of a byte, both from 1.
    fn at(&self, byte: usize) -> (usize, usize) {
        let line = self.0.partition_point(|start| *start <= byte);
        let start = self.0.get(line.saturating_sub(1)).copied().unwrap_or(0);
        (line, byte - start + 1)
    }
}
