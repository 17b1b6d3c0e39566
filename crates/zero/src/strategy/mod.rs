//! Where the parts of training state live: the choice that tells DDP, ZeRO and FSDP apart.

mod data_parallel;
mod offloaded;
mod zero_stage;

pub use data_parallel::DataParallel;
pub use offloaded::Offloaded;
pub use zero_stage::ZeroStage;

use crate::ParameterInfo;

/// Over which ranks one kind of state of one parameter is spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Residence {
    /// Every rank holds all of it.
    Replicated,
    /// Every rank holds its share of it.
    Sharded,
}

/// In which memory of a rank state lies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tier {
    /// The memory of the device that computes.
    #[default]
    Device,
    /// The host's memory; on a CPU device that is the device's own.
    Host,
    /// Files in the folder of [`EngineOptions::disk`](crate::EngineOptions::disk).
    Disk,
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
    /// Where the shares of sharded values lie while they are not gathered.
    pub parameter_tier: Tier,
    /// Where the optimizer state lies between steps.
    pub optimizer_state_tier: Tier,
}

impl Placement {
    /// Everything on every rank, on the device.
    pub const REPLICATED: Self = Self {
        parameter: Residence::Replicated,
        gradient: Residence::Replicated,
        optimizer_state: Residence::Replicated,
        parameter_tier: Tier::Device,
        optimizer_state_tier: Tier::Device,
    };
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

impl<S: ShardingStrategy + ?Sized> ShardingStrategy for std::sync::Arc<S> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn place(&self, parameter: &ParameterInfo) -> Placement {
        (**self).place(parameter)
    }
}
