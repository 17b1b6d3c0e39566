//! Typed values, and how each kind of setting reads them from a file's or a variable's text.

use crate::deepspeed::Node;
use crate::settings::true_or_false;
use std::fmt;

/// A value of a setting.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// True or false.
    Flag(bool),
    /// A whole number.
    Whole(u64),
    /// A number.
    Number(f64),
    /// A name or a text.
    Text(String),
    /// A DeepSpeed configuration, as JSON.
    DeepSpeed(String),
}

/// What a setting's value may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// True or false; also in quotes, and in YAML's and Accelerate's other spellings.
    Flag,
    /// A whole number of at least this.
    Whole(u64),
    /// A number from 0.
    Number,
    /// One of these names, in any case.
    OneOf(&'static [&'static str]),
    /// Any text.
    Text,
    /// Names with commas between; a list of texts is the same.
    Words,
    /// A number of machines, `N`, or the least and the most, `MIN:MAX`.
    Machines,
}

impl Kind {
    /// Reads a value of this kind; `None` where it is none.
    pub(crate) fn read_node(self, node: &Node) -> Option<Value> {
        match (self, node) {
            (Self::Flag, Node::Flag(flag)) => Some(Value::Flag(*flag)),
            // PyYAML reads an unquoted `no` as false, and writes it so.
            (Self::OneOf(names), Node::Flag(false)) if !names.contains(&"false") => self.read_text("no"),
            (_, Node::Flag(flag)) => self.read_text(if *flag { "true" } else { "false" }),
            (Self::Whole(least), Node::Number(number)) => {
                let whole = <u64 as crate::deepspeed::FromNode>::from_node(&Node::Number(number.clone()));
                whole.filter(|whole| *whole >= least).map(Value::Whole)
            }
            (_, Node::Number(number)) => self.read_text(&number.to_string()),
            (_, Node::Text(text)) => self.read_text(text),
            (Self::Words, Node::List(items)) => {
                let words = items.iter().map(|item| match item {
                    Node::Text(text) => Some(text.clone()),
                    Node::Number(number) => Some(number.to_string()),
                    _ => None,
                });
                Some(Value::Text(words.collect::<Option<Vec<_>>>()?.join(",")))
            }
            _ => None,
        }
    }

    /// Reads a value of this kind from the text of a variable or a flag.
    pub(crate) fn read_text(self, text: &str) -> Option<Value> {
        let text = text.trim();
        match self {
            Self::Flag => true_or_false(text).map(Value::Flag),
            Self::Whole(least) => {
                let whole = text.parse().ok().filter(|whole| *whole >= least);
                whole.map(Value::Whole)
            }
            Self::Number => {
                let number = text.parse().ok();
                let usable = |number: &f64| number.is_finite() && *number >= 0.0;
                number.filter(usable).map(Value::Number)
            }
            Self::OneOf(names) => {
                let named = names.iter().find(|name| name.eq_ignore_ascii_case(text));
                named.map(|name| Value::Text((*name).into()))
            }
            Self::Text | Self::Words => (!text.is_empty()).then(|| Value::Text(text.into())),
            Self::Machines => {
                let bound = |text: &str| text.parse::<u64>().ok().filter(|machines| *machines > 0);
                let Some((least, most)) = text.split_once(':') else {
                    return bound(text).map(Value::Whole);
                };
                let (least, most) = (bound(least)?, bound(most)?);
                (least <= most).then(|| Value::Text(text.into()))
            }
        }
    }

    /// Says what is expected, for messages.
    pub fn expected(self) -> String {
        match self {
            Self::Flag => "true or false".into(),
            Self::Whole(least) => format!("a whole number from {least}"),
            Self::Number => "a number from 0".into(),
            Self::OneOf(names) => match names {
                [one] => (*one).into(),
                [others @ .., last] => format!("{} or {last}", others.join(", ")),
                [] => "nothing".into(),
            },
            Self::Text => "a text".into(),
            Self::Words => "names with commas between, or a list of them".into(),
            Self::Machines => "a number of machines, N or MIN:MAX".into(),
        }
    }
}

impl Value {
    /// Returns whether it is true; `None` where it is no flag.
    pub fn as_flag(&self) -> Option<bool> {
        match self {
            Self::Flag(flag) => Some(*flag),
            _ => None,
        }
    }

    /// Returns the text.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the value as JSON.
    pub fn to_json(&self) -> serde_json::Value {
        match self {
            Self::Flag(flag) => (*flag).into(),
            Self::Whole(whole) => (*whole).into(),
            Self::Number(number) => (*number).into(),
            Self::Text(text) => text.as_str().into(),
            Self::DeepSpeed(json) => serde_json::from_str(json).unwrap_or(serde_json::Value::Null),
        }
    }
}

/// As flags and variables have it.
impl fmt::Display for Value {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => flag.fmt(formatter),
            Self::Whole(whole) => whole.fmt(formatter),
            // As Python writes it: 1.0, not 1.
            Self::Number(number) => write!(formatter, "{number:?}"),
            Self::Text(text) => formatter.write_str(text),
            Self::DeepSpeed(json) => formatter.write_str(&crate::deepspeed::encoded(json)),
        }
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

impl From<u64> for Value {
    fn from(whole: u64) -> Self {
        Self::Whole(whole)
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Number(number)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.into())
    }
}
