//! What can be wrong with a configuration.

use std::fmt;

/// A key in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file, as it was named to the reader.
    pub file: String,
    /// The way to the key from the top: `zero_optimization.offload_optimizer.device`.
    pub path: String,
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path.as_str() {
            "" => write!(formatter, "{}", self.file),
            path => write!(formatter, "{}: `{path}`", self.file),
        }
    }
}

/// Everything that can be wrong with a DeepSpeed configuration.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{file}: cannot be read: {source}; expected a DeepSpeed configuration")]
    Unreadable {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// The file is too large to be a configuration.
    #[error("{file}: more than {limit} bytes; expected a DeepSpeed configuration, is this the right file?")]
    TooLarge {
        /// The file.
        file: String,
        /// The most that is read, in bytes.
        limit: u64,
    },
    /// The text is not JSON.
    #[error("{file}:{line}:{column}: {message}; expected JSON (comments and trailing commas are allowed)")]
    Syntax {
        /// The file.
        file: String,
        /// From 1.
        line: usize,
        /// In bytes, from 1.
        column: usize,
        /// What is wrong there.
        message: String,
    },
    /// DeepSpeed has no such key there.
    #[error("{place}: unknown key{}; correct or remove it", nearest.map(|name| format!(", the nearest known is `{name}`")).unwrap_or_default())]
    UnknownKey {
        /// Where.
        place: Place,
        /// The known key of that section with the most similar name.
        nearest: Option<&'static str>,
    },
    /// A value cannot be used.
    #[error("{place}: found {found}, expected {expected}")]
    Value {
        /// Where.
        place: Place,
        /// The value, as JSON.
        found: String,
        /// What was expected, and what to do.
        expected: String,
    },
    /// A value is needed and not there.
    #[error("{place}: missing; expected {expected}")]
    Missing {
        /// Where.
        place: Place,
        /// What was expected, and what to do.
        expected: String,
    },
    /// A key is given twice, under strict validation.
    #[error("{place}: given twice, as {first} and as {last}; keep one")]
    Repeated {
        /// Where.
        place: Place,
        /// The earlier value, as JSON.
        first: String,
        /// The later value, as JSON.
        last: String,
    },
    /// Two settings exclude each other.
    #[error("{place}: excludes `{other}`; {advice}")]
    Conflict {
        /// Where.
        place: Place,
        /// The path of the other.
        other: String,
        /// What to do.
        advice: String,
    },
    /// A feature that changes the training and that is not here.
    #[error("{place}: {found} is not supported in this version; {advice}")]
    Unsupported {
        /// Where.
        place: Place,
        /// The value, as JSON.
        found: String,
        /// What to do.
        advice: String,
    },
    /// The three batch sizes and the number of ranks do not fit.
    #[error("{file}: {message}")]
    BatchSizes {
        /// The file.
        file: String,
        /// The numbers, and what to do.
        message: String,
    },
    /// The file and the program say different things.
    #[error("{file} and the program disagree: {}; make them equal, or write \"auto\" in the file", list.join("; "))]
    Mismatches {
        /// The file.
        file: String,
        /// One sentence a key.
        list: Vec<String>,
    },
    /// The file has a section for what the program brings itself.
    #[error(
        "{place}: the program brings one of its own; remove the section, or give prepare a deepspeed::{stand_in} instead"
    )]
    SectionAndProgram {
        /// The section.
        place: Place,
        /// The type that stands for what the section says.
        stand_in: &'static str,
    },
    /// The program counts on a section that is not there.
    #[error("{}; deepspeed::{stand_in} stands for its section `{section}`: add it, or give prepare one of your own", file.as_ref().map_or_else(|| "no DeepSpeed configuration is in use".to_owned(), |file| format!("{file}: has no section `{section}`")))]
    NoSection {
        /// The file, if there is one.
        file: Option<String>,
        /// The type that stands for what the section says.
        stand_in: &'static str,
        /// The section.
        section: &'static str,
    },
    /// The schedule is the configuration's and the optimizer is not.
    #[error(
        "deepspeed::ConfiguredSchedule needs a deepspeed::ConfiguredOptimizer beside it; give prepare both, or a schedule of your own"
    )]
    ScheduleAlone,
    /// Values are still `"auto"`, and nothing fills them.
    #[error("{file}: nothing fills \"auto\" at {}; write the values", paths.iter().map(|path| format!("`{path}`")).collect::<Vec<_>>().join(", "))]
    StillAuto {
        /// The file.
        file: String,
        /// The paths of the keys.
        paths: Vec<String>,
    },
}
