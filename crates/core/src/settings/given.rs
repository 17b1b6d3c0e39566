//! A value together with who gave it, so that every error names its source.

use crate::Error;
use crate::deepspeed::{ConfigError, Place};
use std::fmt;

/// A value, and who gave it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Given<T> {
    pub(super) value: T,
    pub(super) origin: Origin,
}

/// Who gave a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Origin {
    /// A method of the builder.
    Code(&'static str),
    /// An environment variable.
    Variable(&'static str),
    /// A key in a DeepSpeed configuration.
    File(Place),
}

impl Origin {
    /// Makes the error for a value from here that cannot be used.
    pub(super) fn refuse(&self, value: impl fmt::Display, expected: impl Into<String>) -> Error {
        let (value, expected) = (value.to_string(), expected.into());
        match self {
            Self::Code(setting) | Self::Variable(setting) => Error::Setting {
                setting,
                value,
                expected,
            },
            Self::File(place) => Error::DeepSpeed(ConfigError::Value {
                place: place.clone(),
                found: value,
                expected,
            }),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(method) => write!(formatter, "AcceleratorBuilder::{method}"),
            Self::Variable(name) => formatter.write_str(name),
            Self::File(place) => place.fmt(formatter),
        }
    }
}

impl<T> Given<T> {
    pub(super) fn by_code(method: &'static str, value: T) -> Self {
        let origin = Origin::Code(method);
        Self { value, origin }
    }

    pub(super) fn by_variable(name: &'static str, value: T) -> Self {
        let origin = Origin::Variable(name);
        Self { value, origin }
    }
}
