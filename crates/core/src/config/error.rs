//! What can be wrong with configuration files.

use crate::deepspeed::ConfigError;

/// Everything that can be wrong with a configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigurationError {
    /// A file cannot be read.
    #[error("{file}: cannot be read: {source}; expected a configuration file (YAML, JSON or TOML)")]
    Unreadable {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// A file is too large to be a configuration.
    #[error("{file}: more than {limit} bytes; expected a configuration, is this the right file?")]
    TooLarge {
        /// The file.
        file: String,
        /// The most that is read, in bytes.
        limit: u64,
    },
    /// A text is not what its file's name or its beginning says.
    #[error("{file}{}: {message}; expected {format}", at.map_or_else(String::new, |(line, column)| format!(":{line}:{column}")))]
    Syntax {
        /// The file.
        file: String,
        /// Line and column, both from 1.
        at: Option<(usize, usize)>,
        /// What is wrong there.
        message: String,
        /// The format in which it was read.
        format: &'static str,
    },
    /// Nobody knows the key.
    #[error("{place}: unknown key{}; correct or remove it", nearest.as_ref().map(|name| format!(", the nearest known is `{name}`")).unwrap_or_default())]
    UnknownKey {
        /// Where.
        place: String,
        /// The known key with the most similar name.
        nearest: Option<String>,
    },
    /// A value cannot be used.
    #[error("{place}: found {found}, expected {expected}")]
    Value {
        /// Who gave it.
        place: String,
        /// The value.
        found: String,
        /// What was expected, and what to do.
        expected: String,
    },
    /// Something that exists elsewhere and cannot be here.
    #[error("{place}: {found} is not supported: {reason}")]
    Unsupported {
        /// Who asks for it.
        place: String,
        /// The value.
        found: String,
        /// Why, and what to do.
        reason: String,
    },
    /// Two settings exclude each other.
    #[error("{first} and {second}: {advice}")]
    Conflict {
        /// Who gave the one.
        first: String,
        /// Who gave the other.
        second: String,
        /// What to do.
        advice: String,
    },
    /// DeepSpeed's part cannot be used.
    #[error(transparent)]
    DeepSpeed(#[from] ConfigError),
    /// A file cannot be written.
    #[error("{file}: cannot be written: {source}")]
    Unwritable {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
    },
}
