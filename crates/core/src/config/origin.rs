//! Who gave a value.

use std::fmt;

/// A key in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file, as it was named to the reader.
    pub file: String,
    /// Its line, from 1, where the format tells.
    pub line: Option<usize>,
    /// The way to the key from the top, as the file spells it: `fsdp_config.fsdp_version`.
    pub path: String,
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(formatter, ":{line}")?;
        }
        match self.path.as_str() {
            "" => Ok(()),
            path => write!(formatter, ": `{path}`"),
        }
    }
}

/// Who gave a value; the first that gives one wins, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The program.
    Code,
    /// The command line: the flag.
    Flag(String),
    /// The environment: the variable.
    Variable(&'static str),
    /// A file.
    File(Place),
    /// Nobody.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code => formatter.write_str("code"),
            Self::Flag(flag) => formatter.write_str(flag),
            Self::Variable(name) => formatter.write_str(name),
            Self::File(place) => place.fmt(formatter),
            Self::Default => formatter.write_str("default"),
        }
    }
}
