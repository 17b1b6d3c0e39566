//! What a rule has to say about one place.

use std::fmt;

/// Whether a finding fails the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Severity {
    Warning,
    Error,
}

/// One broken rule at one place. Sorted by place.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Finding {
    pub(super) path: String,
    /// From 1; `None` for the file as a whole.
    pub(super) line: Option<usize>,
    pub(super) severity: Severity,
    /// What is wrong, and what to do.
    pub(super) message: String,
}

impl Finding {
    /// Makes a finding about a whole file.
    pub(super) fn of_file(path: &str, message: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line: None,
            severity: Severity::Error,
            message: message.into(),
        }
    }

    /// Makes a finding about the line with this index, counted from 0.
    pub(super) fn of_line(path: &str, index: usize, message: impl Into<String>) -> Self {
        Self {
            line: Some(index + 1),
            ..Self::of_file(path, message)
        }
    }

    /// Makes it a finding that does not fail the check.
    pub(super) fn into_warning(self) -> Self {
        Self {
            severity: Severity::Warning,
            ..self
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Warning => "warning",
            Severity::Error => "error",
        };
        write!(formatter, "{}", self.path)?;
        if let Some(line) = self.line {
            write!(formatter, ":{line}")?;
        }
        write!(formatter, ": {severity}: {}", self.message)
    }
}

/// The findings as text, one each, for comparison.
#[cfg(test)]
pub(super) fn texts(findings: &[Finding]) -> Vec<String> {
    findings.iter().map(Finding::to_string).collect()
}
