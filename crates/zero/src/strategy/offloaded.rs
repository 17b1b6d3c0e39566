//! Another strategy's choice, with state in other memory than the device's.

use super::{Placement, Residence, ShardingStrategy, Tier};
use crate::ParameterInfo;

/// Moves what another strategy places to the host's memory or to disk, as DeepSpeed's `offload_optimizer` and
/// `offload_param` do. Values that the strategy replicates stay on the device.
#[derive(Debug)]
pub struct Offloaded {
    /// Says what is sharded.
    pub strategy: Box<dyn ShardingStrategy>,
    /// Where shares of sharded values lie.
    pub parameters: Tier,
    /// Where optimizer state lies.
    pub optimizer_state: Tier,
}

impl ShardingStrategy for Offloaded {
    fn name(&self) -> &str {
        self.strategy.name()
    }

    fn place(&self, parameter: &ParameterInfo) -> Placement {
        let placement = self.strategy.place(parameter);
        Placement {
            parameter_tier: match placement.parameter {
                Residence::Replicated => Tier::Device,
                Residence::Sharded => self.parameters,
            },
            optimizer_state_tier: self.optimizer_state,
            ..placement
        }
    }
}
