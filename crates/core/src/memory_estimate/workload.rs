//! What is to be trained how: what all strategies have in common.

use crate::deepspeed::MixedPrecision;
use crate::{Result, RunSettings};
use candle_core::DType;
use sconce_collectives::World;
use sconce_zero::EngineOptions;

/// What the ranks compute on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ComputeDevice {
    /// The CPU: its memory is the host's, and what is offloaded to the host stays where it is.
    #[default]
    Cpu,
    /// A GPU each.
    Cuda,
}

/// An update rule, by how much it keeps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OptimizerKind {
    /// Two moments per element.
    #[default]
    AdamW,
    /// Two moments per element.
    Adam,
    /// One.
    Lion,
    /// One sum of squares.
    Adagrad,
    /// A momentum.
    SgdMomentum,
    /// Nothing.
    Sgd,
}

impl OptimizerKind {
    /// Returns how many f32 numbers it keeps per element.
    pub fn state_arrays(self) -> usize {
        match self {
            Self::AdamW | Self::Adam => 2,
            Self::Lion | Self::Adagrad | Self::SgdMomentum => 1,
            Self::Sgd => 0,
        }
    }
}

/// What is to be trained how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// Ranks over all hosts.
    pub ranks: usize,
    /// Ranks on each host, which share its memory.
    pub ranks_per_host: usize,
    /// What the model computes in; f32 masters stand behind 16 bits.
    pub precision: MixedPrecision,
    /// The update rule.
    pub optimizer: OptimizerKind,
    /// Samples of one forward on one rank.
    pub batch: usize,
    /// Tokens of a sample; `None` is what the configuration says.
    pub sequence: Option<usize>,
    /// What the ranks compute on.
    pub computes_on: ComputeDevice,
}

impl Default for Workload {
    /// One rank on the CPU in f32, AdamW, one sample.
    fn default() -> Self {
        Self {
            ranks: 1,
            ranks_per_host: 1,
            precision: MixedPrecision::No,
            optimizer: OptimizerKind::default(),
            batch: 1,
            sequence: None,
            computes_on: ComputeDevice::default(),
        }
    }
}

impl Workload {
    /// Returns the dtype of parameters and activations.
    pub fn dtype(&self) -> DType {
        match self.precision {
            MixedPrecision::No => DType::F32,
            MixedPrecision::Fp16 => DType::F16,
            _ => DType::BF16,
        }
    }

    /// Returns the engine's options of a run of it.
    pub(super) fn engine_options(&self, settings: &RunSettings) -> Result<EngineOptions> {
        let world = World {
            size: self.ranks,
            local_size: self.ranks_per_host.min(self.ranks),
            ..World::single()
        };
        settings.clone().on_hosts(&world)?.engine_options(None, &world)
    }
}
