//! What one setting is: its key in files, its kind, and the flag and variable that say the same.

use super::value::Kind;

/// A setting that files, the command line or the environment may give.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Setting {
    /// Its key in files, after that of its section: `fsdp_config.fsdp_version`.
    pub path: &'static str,
    /// What it may be.
    pub kind: Kind,
    /// The flag of `sconce launch`, without its dashes.
    pub flag: Option<&'static str>,
    /// The variable that ranks read.
    pub variable: Option<&'static str>,
    /// What holds where nobody says anything, if that is one value.
    pub default: Option<&'static str>,
    /// Other keys that mean the same.
    pub aliases: &'static [&'static str],
    /// What it is for, in a line.
    pub about: &'static str,
}

impl Setting {
    /// Returns the key's first part, where it has two.
    pub fn section(&self) -> Option<&'static str> {
        self.path.split_once('.').map(|(section, _)| section)
    }

    /// Returns the key without its section.
    pub fn key(&self) -> &'static str {
        self.path.split_once('.').map_or(self.path, |(_, key)| key)
    }

    pub(super) const fn new(path: &'static str, kind: Kind, about: &'static str) -> Self {
        Self {
            path,
            kind,
            flag: None,
            variable: None,
            default: None,
            aliases: &[],
            about,
        }
    }

    pub(super) const fn flag(self, flag: &'static str) -> Self {
        Self {
            flag: Some(flag),
            ..self
        }
    }

    pub(super) const fn variable(self, variable: &'static str) -> Self {
        Self {
            variable: Some(variable),
            ..self
        }
    }

    pub(super) const fn default(self, default: &'static str) -> Self {
        Self {
            default: Some(default),
            ..self
        }
    }

    pub(super) const fn aliases(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }
}
