//! FSDP's sharding strategies: what is sharded, and over whom.

use crate::Named;

/// A sharding strategy of FSDP.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FsdpStrategy {
    /// Parameters, gradients and optimizer state are sharded; a unit's parameters are gathered for its forward and again
    /// for its backward. ZeRO's stage 3.
    #[default]
    FullShard,
    /// The same, but a unit's parameters stay from its forward to its backward: one gather less, and the whole model in
    /// memory in between.
    ShardGradOp,
    /// Everything on every rank: data parallelism.
    NoShard,
    /// [`FsdpStrategy::FullShard`] inside a group of ranks, which hold the whole model together; groups are replicas.
    HybridShard,
    /// [`FsdpStrategy::ShardGradOp`] inside a group of ranks; groups are replicas.
    HybridShardZero2,
}

impl FsdpStrategy {
    /// Says whether parameters are sharded.
    pub fn shards(self) -> bool {
        self != Self::NoShard
    }

    /// Says whether a unit's parameters are released after its forward.
    pub fn reshards_after_forward(self) -> bool {
        matches!(self, Self::FullShard | Self::HybridShard)
    }

    /// Says whether groups of ranks are replicas of each other.
    pub fn is_hybrid(self) -> bool {
        matches!(self, Self::HybridShard | Self::HybridShardZero2)
    }
}

impl Named for FsdpStrategy {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("FULL_SHARD", Self::FullShard),
        ("SHARD_GRAD_OP", Self::ShardGradOp),
        ("NO_SHARD", Self::NoShard),
        ("HYBRID_SHARD", Self::HybridShard),
        ("HYBRID_SHARD_ZERO2", Self::HybridShardZero2),
    ];
    const HAS_NUMBERS: bool = true;
}
