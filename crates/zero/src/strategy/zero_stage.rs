//! ZeRO's stages (Rajbhandari et al. 2020): what data parallelism replicates without need is sharded.

use super::{Placement, Residence, ShardingStrategy};
use crate::ParameterInfo;

/// A stage of ZeRO. Elements moved per step and rank, of P parameters: 2P in stages 1 and 2, as in data parallelism, 3P
/// in stage 3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroStage {
    /// Optimizer state is sharded: each rank updates its share of every parameter, and ranks exchange the results.
    /// Gradients are reduced at the end of an accumulation window.
    One,
    /// Reduced gradients are sharded too: they are reduced in every backward, each rank keeps its share, and full
    /// gradients exist only in a few buffers. Accumulation over n backwards moves (n + 1) P elements.
    Two,
    /// Parameters are sharded too, from their creation: a unit's are gathered for its forward and its backward, and
    /// released after each. Accumulation over n backwards moves 3nP elements.
    Three {
        /// Parameters of at most this many elements stay whole on every rank; DeepSpeed's
        /// `stage3_param_persistence_threshold`.
        persistence_threshold: usize,
    },
}

impl ZeroStage {
    /// Stage 3 with DeepSpeed's default threshold.
    pub const THREE: Self = Self::Three {
        persistence_threshold: 100_000,
    };
}

impl ShardingStrategy for ZeroStage {
    fn name(&self) -> &str {
        match self {
            Self::One => "zero_1",
            Self::Two => "zero_2",
            Self::Three { .. } => "zero_3",
        }
    }

    fn place(&self, parameter: &ParameterInfo) -> Placement {
        Placement {
            parameter: match self {
                Self::Three { persistence_threshold } if parameter.elements() > *persistence_threshold => {
                    Residence::Sharded
                }
                _ => Residence::Replicated,
            },
            gradient: match self {
                Self::One => Residence::Replicated,
                Self::Two | Self::Three { .. } => Residence::Sharded,
            },
            optimizer_state: Residence::Sharded,
            ..Placement::REPLICATED
        }
    }
}
