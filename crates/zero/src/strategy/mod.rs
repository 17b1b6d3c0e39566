//! Where the parts of training state live: the choice that tells DDP, ZeRO and FSDP apart.

mod data_parallel;
mod zero_stage;

pub use data_parallel::DataParallel;
pub use zero_stage::ZeroStage;

use crate::ParameterInfo;

/// Where one kind of state of one parameter lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Residence {
    /// Every rank holds all of it.
    Replicated,
    /// Every rank holds its share of it.
    Sharded,
}

/// Where the parameter, its gradient and its optimizer state live.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// The values the model computes with.
    pub parameter: Residence,
    /// The gradient, once reduced.
    pub gradient: Residence,
    /// What the optimizer keeps.
    pub optimizer_state: Residence,
}

/// A choice of placements; open to users.
///
/// The choice must be the same function on all ranks: it decides which collectives run.
pub trait ShardingStrategy: Send + Sync + std::fmt::Debug {
    /// Returns the name used in messages, for example `data_parallel`.
    fn name(&self) -> &str;

    /// Returns where the state of `parameter` lives.
    fn place(&self, parameter: &ParameterInfo) -> Placement;
}
