//! What a reader should know about a file that loads.

use std::fmt;

/// One thing that is in a file and does not do what it may seem to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Where: a file and a key.
    pub place: String,
    /// What is to be known.
    pub message: String,
}

impl Warning {
    pub(super) fn new(place: impl fmt::Display, message: impl Into<String>) -> Self {
        Self {
            place: place.to_string(),
            message: message.into(),
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.place, self.message)
    }
}
