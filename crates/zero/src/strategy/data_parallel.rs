//! Data parallelism: everything everywhere, gradients averaged.

use super::{Placement, ShardingStrategy};
use crate::ParameterInfo;

/// Every rank holds the whole model, all gradients and all optimizer state, as in PyTorch DDP.
#[derive(Debug, Clone, Copy, Default)]
pub struct DataParallel;

impl ShardingStrategy for DataParallel {
    fn name(&self) -> &str {
        "data_parallel"
    }

    fn place(&self, _parameter: &ParameterInfo) -> Placement {
        Placement::REPLICATED
    }
}
