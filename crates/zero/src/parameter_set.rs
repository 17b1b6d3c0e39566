//! A set of parameters, said as a rule.

use crate::ParameterInfo;
use std::sync::Arc;

/// A set of parameters by a rule on what is known of each, usually its name.
///
/// The rule must be the same function on all ranks.
///
/// ```
/// use sconce_zero::ParameterSet;
///
/// let adapters = ParameterSet::matching(|parameter| parameter.name.contains(".lora_"));
/// # let info = |name: &str| sconce_zero::ParameterInfo { name: name.into(), shape: vec![1] };
/// assert!(adapters.contains(&info("layers.0.lora_a.weight")));
/// assert!(!adapters.contains(&info("layers.0.weight")));
/// ```
#[derive(Clone, Default)]
pub struct ParameterSet {
    rule: Option<Arc<Rule>>,
}

type Rule = dyn Fn(&ParameterInfo) -> bool + Send + Sync;

impl ParameterSet {
    /// Returns the empty set.
    pub fn none() -> Self {
        Self::default()
    }

    /// Returns the set of all parameters.
    pub fn all() -> Self {
        Self::matching(|_| true)
    }

    /// Returns the set of all parameters for which `rule` holds.
    pub fn matching(rule: impl Fn(&ParameterInfo) -> bool + Send + Sync + 'static) -> Self {
        Self {
            rule: Some(Arc::new(rule)),
        }
    }

    /// Returns the biases, and the weights of norms and other layers that have one dimension or none: the parameters
    /// that common recipes do not decay.
    pub fn norms_and_biases() -> Self {
        Self::matching(|parameter| parameter.shape.len() < 2 || parameter.name.ends_with("bias"))
    }

    /// Says whether a parameter is in the set.
    pub fn contains(&self, parameter: &ParameterInfo) -> bool {
        self.rule.as_ref().is_some_and(|rule| rule(parameter))
    }
}

impl std::fmt::Debug for ParameterSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.rule.is_some() { "matching(..)" } else { "none" })
    }
}
