//! Data parallelism: everything everywhere, gradients averaged.

use super::{Placement, Residence, ShardingStrategy};
use crate::ParameterInfo;

/// Every rank holds the whole model, all gradients and all optimizer state, as in PyTorch DDP.
#[derive(Debug, Clone, Copy, Default)]
pub struct DataParallel;

impl ShardingStrategy for DataParallel {
    fn name(&self) -> &str {
        "data_parallel"
    }

    fn place(&self, _parameter: &ParameterInfo) -> Placement {
        Placement {
            parameter: Residence::Replicated,
            gradient: Residence::Replicated,
            optimizer_state: Residence::Replicated,
        }
    }
}
