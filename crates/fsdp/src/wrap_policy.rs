//! Which of the parts that a model declares become units of their own.

use crate::{Error, IgnoredModules, Named, Result};
use sconce_zero::{UnitCandidate, UnitPolicy};

/// Elements from which [`WrapPolicy::SizeBased`] makes a unit where nothing is said, as in PyTorch.
pub const MIN_NUM_PARAMS: usize = 100_000_000;

/// A choice among the parts that a model declares with `unit_of_class`: a unit's parameters
/// are gathered together.
///
/// A part that is not chosen belongs to the part around it. At the top there is none: such parameters stay whole on every
/// rank, and only their gradients and optimizer state are sharded. (PyTorch shards them in a unit that is gathered during
/// the whole pass.)
#[derive(Debug, Clone, Default)]
pub enum WrapPolicy {
    /// Parts of these classes; without any, every part that the model declares (in transformers: the model's
    /// `_no_split_modules`).
    TransformerBased {
        /// Names of classes, for example `LlamaDecoderLayer`.
        classes: Vec<String>,
    },
    /// Parts with at least this many elements that no unit inside them has taken.
    SizeBased {
        /// The least number of elements; [`MIN_NUM_PARAMS`] by default.
        min_num_params: usize,
    },
    /// No part.
    #[default]
    NoWrap,
    /// Parts for which a rule of the program's holds.
    Chosen(UnitPolicy),
}

/// The policies that have a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AutoWrapPolicy {
    /// [`WrapPolicy::TransformerBased`].
    TransformerBased,
    /// [`WrapPolicy::SizeBased`].
    SizeBased,
    /// [`WrapPolicy::NoWrap`].
    NoWrap,
}

impl Named for AutoWrapPolicy {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("TRANSFORMER_BASED_WRAP", Self::TransformerBased),
        ("SIZE_BASED_WRAP", Self::SizeBased),
        ("NO_WRAP", Self::NoWrap),
    ];
}

impl WrapPolicy {
    /// Makes the policy of parts of these classes.
    pub fn transformer_based<'a>(classes: impl IntoIterator<Item = &'a str>) -> Self {
        Self::TransformerBased {
            classes: classes.into_iter().map(str::to_owned).collect(),
        }
    }

    /// Makes the policy of a rule. It must be the same function on all ranks.
    pub fn matching(rule: impl Fn(&UnitCandidate<'_>) -> bool + Send + Sync + 'static) -> Self {
        Self::Chosen(UnitPolicy::matching(rule))
    }

    /// Fails if classes are named that no part of the model has; `known` are those that there are.
    ///
    /// # Errors
    /// [`Error::UnknownClasses`].
    pub fn check_classes(&self, known: &[String]) -> Result<()> {
        let Self::TransformerBased { classes } = self else {
            return Ok(());
        };
        let missing = classes.iter().filter(|class| !known.contains(class));
        let missing = Vec::from_iter(missing.cloned());
        if missing.is_empty() {
            return Ok(());
        }
        let mut known = known.to_vec();
        known.retain(|class| !class.is_empty());
        known.sort();
        known.dedup();
        Err(Error::UnknownClasses { missing, known })
    }

    /// Returns the rule, which never chooses what is ignored.
    pub fn unit_policy(&self, ignored: Option<&IgnoredModules>) -> UnitPolicy {
        let chosen = match self.clone() {
            Self::TransformerBased { classes } if classes.is_empty() => UnitPolicy::all(),
            Self::TransformerBased { classes } => {
                UnitPolicy::matching(move |part| classes.iter().any(|class| class == part.class))
            }
            Self::SizeBased { min_num_params } => UnitPolicy::matching(move |part| part.elements >= min_num_params),
            Self::NoWrap => UnitPolicy::none(),
            Self::Chosen(policy) => policy,
        };
        match ignored.cloned() {
            Some(ignored) => UnitPolicy::matching(move |part| chosen.chooses(part) && !ignored.contains(part.name)),
            None => chosen,
        }
    }
}
