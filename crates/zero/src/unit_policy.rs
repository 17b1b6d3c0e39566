//! Which of the parts that a model declares become units, or are recomputed.

use std::sync::Arc;

/// A part of a model that may become a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnitCandidate<'a> {
    /// Its name, for example `model.layers.0`.
    pub name: &'a str,
    /// Its class as the model says, for example `LlamaDecoderLayer`; empty where it says none.
    pub class: &'a str,
    /// Elements of its parameters that no unit inside it has taken.
    pub elements: usize,
}

/// A choice among the parts that a model declares.
///
/// The rule must be the same function on all ranks.
#[derive(Clone, Default)]
pub struct UnitPolicy {
    rule: Option<Rule>,
}

type Rule = Arc<dyn Fn(&UnitCandidate<'_>) -> bool + Send + Sync>;

impl UnitPolicy {
    /// Chooses every part.
    pub fn all() -> Self {
        Self::matching(|_| true)
    }

    /// Chooses none.
    pub fn none() -> Self {
        Self::default()
    }

    /// Chooses the parts for which `rule` holds.
    pub fn matching(rule: impl Fn(&UnitCandidate<'_>) -> bool + Send + Sync + 'static) -> Self {
        Self {
            rule: Some(Arc::new(rule)),
        }
    }

    /// Says whether it is the policy that chooses none.
    pub(crate) fn is_none(&self) -> bool {
        self.rule.is_none()
    }

    /// Says whether a part is chosen.
    pub fn chooses(&self, candidate: &UnitCandidate<'_>) -> bool {
        self.rule.as_ref().is_some_and(|rule| rule(candidate))
    }
}

impl std::fmt::Debug for UnitPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.rule.is_some() { "matching(..)" } else { "none" })
    }
}
