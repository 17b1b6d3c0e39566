//! Where a strategy of FSDP's puts the state of each parameter.

use crate::{FsdpStrategy, IgnoredModules};
use sconce_zero::{ParameterInfo, Placement, Residence, ShardingStrategy};

/// The placements of a strategy that shards.
#[derive(Debug)]
pub(crate) struct FsdpPlacement {
    pub(crate) strategy: FsdpStrategy,
    pub(crate) ignored: Option<IgnoredModules>,
    /// Whether there are units, without which nobody gathers parameters.
    pub(crate) has_units: bool,
}

impl ShardingStrategy for FsdpPlacement {
    fn name(&self) -> &str {
        match self.strategy {
            FsdpStrategy::FullShard => "full_shard",
            FsdpStrategy::ShardGradOp => "shard_grad_op",
            FsdpStrategy::NoShard => "no_shard",
            FsdpStrategy::HybridShard => "hybrid_shard",
            FsdpStrategy::HybridShardZero2 => "hybrid_shard_zero2",
        }
    }

    fn place(&self, parameter: &ParameterInfo) -> Placement {
        let is_ignored = self
            .ignored
            .as_ref()
            .is_some_and(|ignored| ignored.contains(&parameter.name));
        if is_ignored || !self.strategy.shards() {
            return Placement::REPLICATED;
        }
        Placement {
            parameter: match self.has_units {
                true => Residence::Sharded,
                false => Residence::Replicated,
            },
            gradient: Residence::Sharded,
            optimizer_state: Residence::Sharded,
            ..Placement::REPLICATED
        }
    }
}
