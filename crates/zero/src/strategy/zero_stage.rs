//! ZeRO's stages (Rajbhandari et al. 2020): what data parallelism replicates without need is sharded.

use super::{Placement, Residence, ShardingStrategy};
use crate::ParameterInfo;

/// A stage of ZeRO. Elements moved per step and rank, of P parameters: 2P in every stage, as in data parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroStage {
    /// Optimizer state is sharded: each rank updates its share of every parameter, and ranks exchange the results.
    /// Gradients are reduced at the end of an accumulation window.
    One,
    /// Reduced gradients are sharded too: they are reduced in every backward, each rank keeps its share, and full
    /// gradients exist only in a few buffers. Accumulation over n backwards moves (n + 1) P elements.
    Two,
}

impl ShardingStrategy for ZeroStage {
    fn name(&self) -> &str {
        match self {
            Self::One => "zero_1",
            Self::Two => "zero_2",
        }
    }

    fn place(&self, _parameter: &ParameterInfo) -> Placement {
        Placement {
            parameter: Residence::Replicated,
            gradient: match self {
                Self::One => Residence::Replicated,
                Self::Two => Residence::Sharded,
            },
            optimizer_state: Residence::Sharded,
        }
    }
}
