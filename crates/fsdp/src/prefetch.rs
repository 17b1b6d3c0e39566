//! When the next unit's parameters are gathered during the backward.

use crate::Named;

/// When the parameters of the unit that comes next in the backward are gathered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BackwardPrefetch {
    /// Before the current unit's gradients are computed: most overlap, one unit more in memory.
    Pre,
    /// After they are computed.
    Post,
    /// When the unit needs them.
    #[default]
    None,
}

impl Named for BackwardPrefetch {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("BACKWARD_PRE", Self::Pre),
        ("BACKWARD_POST", Self::Post),
        ("NO_PREFETCH", Self::None),
    ];
}
