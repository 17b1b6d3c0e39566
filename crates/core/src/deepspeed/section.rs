//! Typed reading of one JSON object; the keys that were asked for are the keys that are known.

use super::error::{ConfigError, Place};
use super::json::Node;
use super::{Setting, Warning};
use crate::nearest::nearest;
use std::cell::RefCell;

/// The file that is being read, and what there is to say about it.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) file: String,
    pub(super) warnings: RefCell<Vec<Warning>>,
}

impl Source {
    pub(super) fn warn(&self, warning: Warning) {
        self.warnings.borrow_mut().push(warning);
    }

    pub(super) fn place(&self, path: impl Into<String>) -> Place {
        Place {
            file: self.file.clone(),
            path: path.into(),
        }
    }
}

/// What DeepSpeed does with `"auto"` in a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AutoRule {
    /// It drops the key, so that the default holds.
    MeansDefault,
    /// It does not know the word.
    Refused,
}

/// A JSON object that is being read.
#[derive(Debug)]
pub(super) struct Section<'a> {
    source: &'a Source,
    path: String,
    node: &'a Node,
    auto: AutoRule,
    known: Vec<&'static str>,
}

/// A value that one JSON value gives.
pub(crate) trait FromNode: Sized {
    const EXPECTED: &'static str;

    fn from_node(node: &Node) -> Option<Self>;
}

impl<'a> Section<'a> {
    pub(super) fn root(source: &'a Source, node: &'a Node) -> Result<Self, ConfigError> {
        Self::new(source, String::new(), node, AutoRule::Refused)
    }

    fn new(source: &'a Source, path: String, node: &'a Node, auto: AutoRule) -> Result<Self, ConfigError> {
        if !matches!(node, Node::Object(_)) {
            return Err(ConfigError::Value {
                place: source.place(path),
                found: node.to_string(),
                expected: "an object, {...}".into(),
            });
        }
        Ok(Self {
            source,
            path,
            node,
            auto,
            known: Vec::new(),
        })
    }

    /// Opens the object under `key`.
    pub(super) fn child(&mut self, key: &'static str, auto: AutoRule) -> Result<Option<Self>, ConfigError> {
        let Some(node) = self.get(key) else { return Ok(None) };
        Self::new(self.source, self.path(key), node, auto).map(Some)
    }

    /// Reads `empty` in the place of an absent object, for its defaults.
    pub(super) fn absent<'b>(&self, key: &str, empty: &'b Node) -> Result<Section<'b>, ConfigError>
    where
        'a: 'b,
    {
        Section::new(self.source, self.path(key), empty, AutoRule::Refused)
    }

    /// Reads a value that may be absent or null.
    pub(super) fn optional<T: FromNode>(&mut self, key: &'static str) -> Result<Option<T>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(node) if node.is_auto() && self.auto == AutoRule::MeansDefault => {
                self.source.warn(Warning::Replaced {
                    path: self.path(key),
                    found: node.to_string(),
                    used: "DeepSpeed's default".into(),
                });
                Ok(None)
            }
            Some(node) => match T::from_node(node) {
                Some(value) => Ok(Some(value)),
                None => Err(self.invalid(key, T::EXPECTED)),
            },
        }
    }

    /// Reads a value that has a default.
    pub(super) fn value<T: FromNode>(&mut self, key: &'static str, default: T) -> Result<T, ConfigError> {
        Ok(self.optional(key)?.unwrap_or(default))
    }

    /// Reads a value that the program may fill, or that is absent.
    pub(super) fn optional_setting<T: FromNode>(
        &mut self,
        key: &'static str,
    ) -> Result<Option<Setting<T>>, ConfigError> {
        match self.get(key) {
            Some(node) if node.is_auto() => Ok(Some(Setting::Auto)),
            _ => Ok(self.optional(key)?.map(Setting::Given)),
        }
    }

    /// Reads a value that the program may fill, and that has a default.
    pub(super) fn setting<T: FromNode>(&mut self, key: &'static str, default: T) -> Result<Setting<T>, ConfigError> {
        Ok(self.optional_setting(key)?.unwrap_or(Setting::Given(default)))
    }

    /// Reads a value that must be there.
    pub(super) fn required<T: FromNode>(&mut self, key: &'static str) -> Result<T, ConfigError> {
        let value = self.optional(key)?;
        value.ok_or_else(|| self.missing(key, T::EXPECTED))
    }

    /// Accepts keys that mean nothing here, with a warning each.
    pub(super) fn no_effect(&mut self, keys: &[&'static str]) {
        for key in keys {
            if self.get(key).is_some() {
                self.source.warn(Warning::NoEffect { path: self.path(key) });
            }
        }
    }

    /// Says that a key means nothing here whose value asks for something else than the default.
    pub(super) fn no_effect_unless<T: PartialEq>(&self, key: &'static str, value: &T, default: &T) {
        if value != default {
            self.source.warn(Warning::NoEffect { path: self.path(key) });
        }
    }

    /// Refuses a feature where `turned_on` finds it turned on; otherwise its key means nothing here.
    pub(super) fn refuse(
        &mut self,
        key: &'static str,
        turned_on: impl FnOnce(&Node) -> bool,
        advice: &str,
    ) -> Result<(), ConfigError> {
        match self.get(key) {
            Some(node) if turned_on(node) => Err(self.unsupported(key, advice)),
            _ => {
                self.no_effect(&[key]);
                Ok(())
            }
        }
    }

    /// Refuses the value under `key` unless `condition` holds.
    pub(super) fn check(&self, condition: bool, key: &str, expected: &str) -> Result<(), ConfigError> {
        if condition {
            Ok(())
        } else {
            Err(self.invalid(key, expected))
        }
    }

    pub(super) fn invalid(&self, key: &str, expected: impl Into<String>) -> ConfigError {
        ConfigError::Value {
            place: self.place(key),
            found: self.found(key),
            expected: expected.into(),
        }
    }

    pub(super) fn unsupported(&self, key: &str, advice: impl Into<String>) -> ConfigError {
        ConfigError::Unsupported {
            place: self.place(key),
            found: self.found(key),
            advice: advice.into(),
        }
    }

    pub(super) fn missing(&self, key: &str, expected: impl Into<String>) -> ConfigError {
        ConfigError::Missing {
            place: self.place(key),
            expected: expected.into(),
        }
    }

    pub(super) fn place(&self, key: &str) -> Place {
        self.source.place(self.path(key))
    }

    pub(super) fn source(&self) -> &'a Source {
        self.source
    }

    pub(super) fn path(&self, key: &str) -> String {
        match self.path.as_str() {
            "" => key.into(),
            path => format!("{path}.{key}"),
        }
    }

    /// Ends the reading: a key that nobody asked for is unknown.
    pub(super) fn finish(self) -> Result<(), ConfigError> {
        let Node::Object(entries) = self.node else {
            return Ok(());
        };
        match entries.iter().find(|(key, _)| !self.known.contains(&key.as_str())) {
            None => Ok(()),
            Some((key, _)) => Err(ConfigError::UnknownKey {
                place: self.place(key),
                nearest: nearest(key, self.known.iter().copied()),
            }),
        }
    }

    fn get(&mut self, key: &'static str) -> Option<&'a Node> {
        self.known.push(key);
        self.node.get(key).filter(|node| **node != Node::Null)
    }

    fn found(&self, key: &str) -> String {
        self.node.get(key).map_or_else(|| "nothing".into(), Node::to_string)
    }
}

impl FromNode for bool {
    const EXPECTED: &'static str = "true or false, without quotes";

    fn from_node(node: &Node) -> Option<Self> {
        match node {
            Node::Flag(flag) => Some(*flag),
            _ => None,
        }
    }
}

impl FromNode for u64 {
    const EXPECTED: &'static str = "a whole number from 0, without quotes (5e8 is one)";

    fn from_node(node: &Node) -> Option<Self> {
        let Node::Number(number) = node else { return None };
        number.as_u64().or_else(|| {
            let value = number.as_f64()?;
            // 2^64 as f64; whatever is below it converts without loss when it is whole.
            (value >= 0.0 && value.fract() == 0.0 && value < 18_446_744_073_709_551_616.0).then_some(value as Self)
        })
    }
}

impl FromNode for f64 {
    const EXPECTED: &'static str = "a number, without quotes";

    fn from_node(node: &Node) -> Option<Self> {
        let Node::Number(number) = node else { return None };
        number.as_f64()
    }
}

impl FromNode for (f64, f64) {
    const EXPECTED: &'static str = "a list of two numbers";

    fn from_node(node: &Node) -> Option<Self> {
        match node {
            Node::List(items) if items.len() == 2 => Some((f64::from_node(&items[0])?, f64::from_node(&items[1])?)),
            _ => None,
        }
    }
}

impl FromNode for String {
    const EXPECTED: &'static str = "a text in quotes";

    fn from_node(node: &Node) -> Option<Self> {
        match node {
            Node::Text(text) => Some(text.clone()),
            _ => None,
        }
    }
}
