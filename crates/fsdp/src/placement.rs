//! Where a strategy of FSDP's puts the state of each parameter.

use crate::{FsdpStrategy, IgnoredModules};
use sconce_zero::{ParameterInfo, Placement, Residence, ShardingStrategy};

/// The placements of a strategy. What lies in no unit is whole all the same; the engine sees to that.
#[derive(Debug)]
pub(crate) struct FsdpPlacement {
    pub(crate) strategy: FsdpStrategy,
    pub(crate) ignored: Option<IgnoredModules>,
    pub(crate) sync_each_batch: bool,
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
            parameter: Residence::Sharded,
            gradient: match self.sync_each_batch {
                true => Residence::Sharded,
                false => Residence::Replicated,
            },
            optimizer_state: Residence::Sharded,
            ..Placement::REPLICATED
        }
    }
}
