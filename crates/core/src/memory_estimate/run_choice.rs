//! A way to run: the strategy, and what is offloaded or computed again.

use super::workload::Workload;
use crate::deepspeed::MixedPrecision;
use crate::environment as variable;
use crate::{AcceleratorBuilder, Result, RunSettings, Sharding};
use sconce_fsdp::FsdpStrategy;
use sconce_zero::{Tier, ZeroStage};

/// A strategy as users name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunStrategy {
    /// Everything on every rank.
    DataParallel,
    /// ZeRO stage 1.
    Zero1,
    /// ZeRO stage 2.
    Zero2,
    /// ZeRO stage 3, with the launcher's defaults.
    Zero3,
    /// A strategy of FSDP's, with every part that the model declares as a unit.
    Fsdp(FsdpStrategy),
}

impl RunStrategy {
    /// All of them, from the one that moves least to the one that holds least.
    pub const ALL: [Self; 8] = [
        Self::DataParallel,
        Self::Zero1,
        Self::Zero2,
        Self::Fsdp(FsdpStrategy::ShardGradOp),
        Self::Fsdp(FsdpStrategy::HybridShardZero2),
        Self::Zero3,
        Self::Fsdp(FsdpStrategy::FullShard),
        Self::Fsdp(FsdpStrategy::HybridShard),
    ];

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::DataParallel => "data_parallel",
            Self::Zero1 => "zero_1",
            Self::Zero2 => "zero_2",
            Self::Zero3 => "zero_3",
            Self::Fsdp(FsdpStrategy::FullShard) => "full_shard",
            Self::Fsdp(FsdpStrategy::ShardGradOp) => "shard_grad_op",
            Self::Fsdp(FsdpStrategy::NoShard) => "no_shard",
            Self::Fsdp(FsdpStrategy::HybridShard) => "hybrid_shard",
            Self::Fsdp(FsdpStrategy::HybridShardZero2) => "hybrid_shard_zero2",
        }
    }

    /// Returns the strategy of a name.
    pub fn from_name(name: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter().chain([Self::Fsdp(FsdpStrategy::NoShard)]);
        all.find(|strategy| strategy.name() == name)
    }
}

/// A way to run a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunChoice {
    /// What is sharded.
    pub strategy: RunStrategy,
    /// Where shares of sharded parameters lie.
    pub parameters: Tier,
    /// Where optimizer state, masters and gradients lie; gradients are never on disk.
    pub optimizer: Tier,
    /// Whether the parts of the model compute again in the backward.
    pub recompute: bool,
}

impl RunChoice {
    /// Makes the choice of a strategy with everything on the device and nothing computed again.
    pub fn new(strategy: RunStrategy) -> Self {
        Self {
            strategy,
            parameters: Tier::Device,
            optimizer: Tier::Device,
            recompute: false,
        }
    }

    /// Returns the variables that ask a rank for it, as `sconce launch` sets them; `folder` is where state on disk lies.
    pub fn variables(&self, workload: &Workload, folder: &str) -> Vec<(&'static str, String)> {
        let precision = match workload.precision {
            MixedPrecision::No => "no",
            MixedPrecision::Fp16 => "fp16",
            MixedPrecision::Fp8 => "fp8",
            MixedPrecision::Bf16 => "bf16",
        };
        let mut variables = vec![(variable::ACCELERATE_MIXED_PRECISION, precision.to_owned())];
        let mut set = |name, value: &str| variables.push((name, value.to_owned()));
        match self.strategy {
            RunStrategy::DataParallel => {}
            RunStrategy::Fsdp(strategy) => {
                set(variable::ACCELERATE_USE_FSDP, "true");
                set(variable::FSDP_SHARDING_STRATEGY, sconce_fsdp::Named::name(strategy));
                set(variable::FSDP_AUTO_WRAP_POLICY, "TRANSFORMER_BASED_WRAP");
                set(variable::FSDP_BACKWARD_PREFETCH, "BACKWARD_PRE");
                set(variable::FSDP_OFFLOAD_PARAMS, yes_or_no(self.parameters == Tier::Host));
                set(variable::FSDP_ACTIVATION_CHECKPOINTING, yes_or_no(self.recompute));
            }
            zero => {
                let stage = match zero {
                    RunStrategy::Zero1 => "1",
                    RunStrategy::Zero2 => "2",
                    _ => "3",
                };
                set(variable::ACCELERATE_USE_DEEPSPEED, "true");
                set(variable::ACCELERATE_DEEPSPEED_ZERO_STAGE, stage);
                set(
                    variable::ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE,
                    device_of(self.optimizer),
                );
                set(
                    variable::ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE,
                    device_of(self.parameters),
                );
                if self.optimizer == Tier::Disk {
                    set(variable::ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH, folder);
                }
                if self.parameters == Tier::Disk {
                    set(variable::ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH, folder);
                }
            }
        }
        variables
    }

    /// Returns what a run of this choice is.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) for a combination that no run can have.
    pub fn settings(&self, workload: &Workload) -> Result<RunSettings> {
        let variables = self.variables(workload, "disk");
        let lookup = |name: &str| {
            let found = variables.iter().find(|(of, _)| *of == name);
            found.map(|(_, value)| value.clone())
        };
        AcceleratorBuilder::default().settings(workload.ranks, lookup)
    }

    /// Returns the choice that a run is of; `None` where its strategy is the program's own.
    pub fn of_run(settings: &RunSettings) -> Option<Self> {
        let (strategy, parameters, optimizer) = match &settings.sharding {
            Sharding::DataParallel => (RunStrategy::DataParallel, Tier::Device, Tier::Device),
            Sharding::Zero {
                stage,
                parameters,
                optimizer_state,
            } => {
                let strategy = match stage {
                    ZeroStage::One => RunStrategy::Zero1,
                    ZeroStage::Two => RunStrategy::Zero2,
                    ZeroStage::Three { .. } => RunStrategy::Zero3,
                };
                (strategy, *parameters, *optimizer_state)
            }
            Sharding::FullySharded {
                strategy,
                parameters,
                optimizer_state,
            } => (RunStrategy::Fsdp(*strategy), *parameters, *optimizer_state),
            Sharding::Custom(_) => return None,
        };
        let recompute = settings
            .fully_sharded
            .as_ref()
            .is_some_and(|run| run.activation_checkpointing);
        Some(Self {
            strategy,
            parameters,
            optimizer,
            recompute,
        })
    }
}

fn yes_or_no(value: bool) -> &'static str {
    if value { "true" } else { "false" }
}

/// Returns DeepSpeed's name of a tier.
pub(super) fn device_of(tier: Tier) -> &'static str {
    match tier {
        Tier::Host => "cpu",
        Tier::Disk => "nvme",
        _ => "none",
    }
}
