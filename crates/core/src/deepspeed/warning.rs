//! What a reader should know about a file that loads.

use std::fmt;

/// One thing that is in the file and does not do what it may seem to do.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// A key is given twice; the last value is in force.
    Repeated {
        /// The path of the key.
        path: String,
        /// The earlier value, as JSON.
        first: String,
        /// The later value, as JSON.
        last: String,
    },
    /// A key of DeepSpeed that means nothing here.
    NoEffect {
        /// The path of the key.
        path: String,
    },
    /// An old name, read as DeepSpeed reads it.
    Deprecated {
        /// The path of the key.
        path: String,
        /// What it is read as.
        read_as: String,
    },
    /// A value that DeepSpeed too replaces by another.
    Replaced {
        /// The path of the key.
        path: String,
        /// The value, as JSON.
        found: String,
        /// What is used.
        used: String,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Repeated { path, first, last } => {
                write!(
                    formatter,
                    "`{path}` is given twice, as {first} and as {last}: {last} is used"
                )
            }
            Self::NoEffect { path } => write!(formatter, "`{path}` has no effect here"),
            Self::Deprecated { path, read_as } => write!(formatter, "`{path}` is deprecated, read as {read_as}"),
            Self::Replaced { path, found, used } => write!(formatter, "`{path}` is {found}: {used} is used"),
        }
    }
}
