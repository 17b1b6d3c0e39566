//! Which of PyTorch's two FSDPs the settings are those of.

use crate::Named;

/// The version of FSDP whose names and defaults hold. Both are carried out alike: parameter by parameter, as FSDP2 does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FsdpVersion {
    /// `FullyShardedDataParallel`: a sharding strategy, prefetching only where it is asked for.
    #[default]
    One,
    /// `fully_shard`: `reshard_after_forward`, the next unit's gather ahead of the backward.
    Two,
}

impl Named for FsdpVersion {
    const NAMES: &'static [(&'static str, Self)] = &[("1", Self::One), ("2", Self::Two)];
}
