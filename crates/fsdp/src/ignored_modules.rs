//! Modules that are not sharded, by a regular expression on their names.

use crate::{Error, Result};
use regex::Regex;

/// Modules whose parameters, with those of all modules inside them, stay whole on every rank.
///
/// The expression must match a module's whole name, for example `model\.embed_tokens`; the model itself has the empty
/// name. Unlike in PyTorch, their gradients are averaged over the ranks like all others, so that replicas stay equal.
///
/// ```
/// use sconce_fsdp::IgnoredModules;
///
/// let ignored = IgnoredModules::new(r"layers\.[02]\.router")?;
/// assert!(ignored.contains("layers.2.router.weight"));
/// assert!(!ignored.contains("layers.1.router.weight") && !ignored.contains("layers.2.weight"));
/// # Ok::<(), sconce_fsdp::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct IgnoredModules {
    pattern: String,
    whole_name: Regex,
}

impl IgnoredModules {
    /// Makes the set of the modules that `pattern` matches.
    ///
    /// # Errors
    /// [`Error::Setting`] if it is no regular expression.
    pub fn new(pattern: &str) -> Result<Self> {
        let refuse = |reason: regex::Error| Error::Setting {
            setting: "ignored_modules",
            value: pattern.to_owned(),
            expected: format!("expected a regular expression: {reason}"),
        };
        // Alone first: around a broken expression the parentheses could mend it.
        Regex::new(pattern).map_err(refuse)?;
        Ok(Self {
            pattern: pattern.to_owned(),
            whole_name: Regex::new(&format!("^(?:{pattern})$")).map_err(refuse)?,
        })
    }

    /// Returns the expression.
    pub fn pattern(&self) -> &str {
        &self.pattern
    }

    /// Says whether the module or parameter of this name lies in an ignored module, or is one.
    pub fn contains(&self, name: &str) -> bool {
        let ends = name.match_indices('.').map(|(end, _)| end);
        let around = std::iter::once(0).chain(ends).chain([name.len()]);
        around
            .map(|end| &name[..end])
            .any(|module| self.whole_name.is_match(module))
    }
}
