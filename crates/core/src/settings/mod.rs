//! What a run is, as one typed value, whoever said it.
//!
//! Everything is parsed and checked here, before ranks meet or anything is built; `sconce launch` asks for the same value
//! before it starts the ranks. In reading order: [`variables`] are parsed; [`said`] adds what code says and compares both
//! with the file; [`resolve`], [`state`] and [`fully_sharded`] make the value.

mod fp8;
mod fully_sharded;
mod given;
mod mesh;
mod resolve;
mod said;
mod state;
mod variables;

pub(crate) use resolve::ProgramSettings;
pub(crate) use variables::{Environment, true_or_false};

use crate::deepspeed::{DeepSpeedConfig, GradientReduction, MixedPrecision};
use crate::fp8::Fp8Recipe;
use crate::schedule::ScheduleStepping;
use crate::{Checkpoints, Result};
use candle_core::{DType, Device};
use sconce_collectives::World;
use sconce_fsdp::{FsdpStrategy, FullySharded};
use sconce_zero::{
    DataParallel, DiskOptions, EngineOptions, Gathering, LossScaling, Offloaded, ParameterSet, PowerSgd,
    ShardingStrategy, Tier, UnitPolicy, ZeroStage,
};
use std::collections::BTreeMap;

/// What a run is: where state lives, in which precision it computes, how gradients become a step.
///
/// A setting comes from code, else from the environment, else from the DeepSpeed configuration, else it has its default.
/// FSDP and DeepSpeed exclude each other.
/// A configuration that decides something (gives a value other than `"auto"`) is not overruled in silence: a different
/// value in code or in the environment is an error that lists all such differences. Two are exempt: a
/// [`ShardingStrategy`] of the program's takes the place of stage and tiers, and `ACCELERATE_MIXED_PRECISION=no`, which
/// Accelerate's launcher always sets, says nothing beside a configuration.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RunSettings {
    /// Where state lives.
    pub sharding: Sharding,
    /// What the model computes in; parameters have this type, and f32 masters where it is not f32. With fp8 it is bf16, but
    /// for products of linear layers.
    pub precision: MixedPrecision,
    /// Whether parameters are f32 all the same, and layers compute their products in the run's precision within
    /// [`autocast`](trait.Accelerator.html#method.autocast).
    pub autocast: bool,
    /// Parameters that are f32 whatever the precision.
    pub keep_in_f32: ParameterSet,
    /// Which parts of the model compute again in the backward; `None` leaves it to FSDP's switch.
    pub recompute: Option<UnitPolicy>,
    /// How scales of fp8 come to be, where that is the precision.
    pub fp8: Option<Fp8Recipe>,
    /// How losses are scaled; `None` takes them as they are.
    ///
    /// With f16, DeepSpeed's rule where DeepSpeed is in use, otherwise PyTorch's. With bf16 under DeepSpeed a scale of 1:
    /// its `check_grad_overflow`, on by default, skips steps whose gradients are not finite.
    pub loss_scaling: Option<LossScaling>,
    /// How gradients are clipped.
    pub clipping: Clipping,
    /// How many samples make a step.
    pub batch: BatchPlan,
    /// When a window of micro-batches ends, and when its gradients travel.
    pub synchronisation: Synchronisation,
    /// How schedulers count.
    pub stepping: ScheduleStepping,
    /// How gradients of several ranks become one.
    pub reduction: GradientReduction,
    /// Allows parameters that get no gradient.
    pub find_unused_parameters: bool,
    /// Looks for losses and gradients that are not finite.
    pub detect_anomaly: bool,
    /// Size at which gradient buckets are closed, in bytes of f32; `None` leaves it to the engine.
    pub bucket_bytes: Option<usize>,
    /// How sharded parameters are gathered.
    pub gathering: Gathering,
    /// Where state on disk lies.
    pub disk: Option<DiskOptions>,
    /// The type in which gradients travel between ranks and are summed.
    pub reduce_dtype: DType,
    /// Where numbered checkpoints are kept.
    pub checkpoints: Option<Checkpoints>,
    /// Whether checkpoints have the values of frozen parameters.
    pub saves_frozen: bool,
    /// Whether each host has a folder of checkpoints of its own.
    pub saves_on_each_node: bool,
    /// Compares shapes over all ranks before every collective on tensors.
    pub debug_mode: bool,
    /// Sends thin factors of gradients in place of gradients.
    pub power_sgd: Option<PowerSgd>,
    /// Whether whole weights are to be gathered when the model is saved in stage 3.
    pub gather_weights_on_save: bool,
    /// The DeepSpeed configuration, filled as far as is known before `prepare`.
    pub deepspeed: Option<DeepSpeedConfig>,
    /// Fully sharded data parallelism, where it is in use. Where code says nothing of a switch, the environment does.
    pub fully_sharded: Option<FullySharded>,
    notices: Vec<String>,
}

/// Where state lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sharding {
    /// Everything is on every rank.
    DataParallel,
    /// As a stage of ZeRO says.
    Zero {
        /// The stage.
        stage: ZeroStage,
        /// Where shares of sharded parameters lie.
        parameters: Tier,
        /// Where optimizer state lies.
        optimizer_state: Tier,
    },
    /// As a strategy of FSDP's says.
    FullySharded {
        /// The strategy.
        strategy: FsdpStrategy,
        /// Where shares of sharded parameters lie.
        parameters: Tier,
        /// Where optimizer state lies.
        optimizer_state: Tier,
    },
    /// As the program's own strategy of this name says.
    Custom(String),
}

/// How gradients are clipped to a global L2 norm.
///
/// The step clips if the program did not clip itself since the last one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Clipping {
    /// The norm to which a step clips; `None` clips only where the program does.
    pub max_norm: Option<f64>,
    /// Who decided so: a method of the builder, a variable, or a key in a file. The program may then clip by no other
    /// norm; `None` leaves it free.
    pub decided_by: Option<String>,
}

/// When a window of micro-batches ends, and when its gradients are reduced over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Synchronisation {
    /// Whether the last batch of a loader ends a window early; if not, the window goes on in the next loop. Accelerate's
    /// `sync_with_dataloader`.
    pub with_dataloader: bool,
    /// Whether every backward reduces, not only a window's last: more traffic, and gradients that are global at any time.
    /// Accelerate's `sync_each_batch`. Sharded gradients (ZeRO-2 and -3, FSDP) are reduced in every backward in any case.
    pub each_batch: bool,
}

impl Default for Synchronisation {
    /// Accelerate's defaults.
    fn default() -> Self {
        Self {
            with_dataloader: true,
            each_batch: false,
        }
    }
}

/// How many samples make a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchPlan {
    /// Forwards of one optimizer step.
    pub accumulation_steps: u64,
    /// Samples of one forward on one rank, where the DeepSpeed configuration says so; the data loader's must be the same.
    pub micro_per_rank: Option<u64>,
    /// Samples of one optimizer step over all ranks, where the DeepSpeed configuration says so.
    pub train: Option<u64>,
}

impl RunSettings {
    /// Returns the type of parameters: that in which the model computes, but with [`RunSettings::autocast`] f32.
    pub fn parameter_dtype(&self) -> DType {
        if self.autocast {
            DType::F32
        } else {
            self.compute_dtype()
        }
    }

    /// Returns the type in which the model computes.
    pub fn compute_dtype(&self) -> DType {
        match self.precision {
            MixedPrecision::No => DType::F32,
            MixedPrecision::Bf16 | MixedPrecision::Fp8 => DType::BF16,
            MixedPrecision::Fp16 => DType::F16,
        }
    }

    /// Returns what a user should be told of a run on `device`: settings that do nothing there. Each is one line.
    pub fn notices(&self, device: &Device) -> Vec<String> {
        let mut notices = self.notices.clone();
        if let Sharding::Zero {
            parameters,
            optimizer_state,
            ..
        }
        | Sharding::FullySharded {
            parameters,
            optimizer_state,
            ..
        } = self.sharding
            && device.is_cpu()
        {
            let on_host = [("parameters", parameters), ("optimizer state", optimizer_state)];
            let on_host = on_host.into_iter().filter(|(_, tier)| *tier == Tier::Host);
            let what = Vec::from_iter(on_host.map(|(what, _)| what)).join(" and ");
            if !what.is_empty() {
                notices.push(format!(
                    "{what} offloaded to the CPU: the ranks compute on the CPU, so that nothing has to move"
                ));
            }
        }
        notices
    }

    /// Returns what a checkpoint tells people of the run: nothing reads it.
    pub(crate) fn in_words(&self) -> BTreeMap<String, String> {
        let words = [
            ("sharding", format!("{:?}", self.sharding)),
            ("precision", format!("{:?}", self.precision)),
            ("batch", format!("{:?}", self.batch)),
            ("clipping", format!("{:?}", self.clipping)),
        ];
        words.map(|(name, text)| (name.to_owned(), text)).into_iter().collect()
    }

    /// Adds what follows from the hosts that the ranks are on.
    ///
    /// # Errors
    /// Groups of ranks that the world cannot be divided into.
    pub(crate) fn on_hosts(mut self, world: &World) -> Result<Self> {
        if let Some(run) = &self.fully_sharded {
            run.shard_group(world.size, world.local_size)?;
            self.notices
                .extend(run.notice_of_one_group(world.size, world.local_size));
        }
        Ok(self)
    }

    /// Returns the engine's options in a world; `custom` is the strategy of [`Sharding::Custom`].
    ///
    /// # Errors
    /// Groups of ranks that the world cannot be divided into.
    pub(crate) fn engine_options(
        &self,
        custom: Option<Box<dyn ShardingStrategy>>,
        world: &World,
    ) -> Result<EngineOptions> {
        let mut default = EngineOptions {
            strategy: self.sharding.strategy(),
            ..EngineOptions::default()
        };
        if let Some(run) = &self.fully_sharded {
            default = run.engine_options(default, world.size, world.local_size)?;
        }
        let bucket_bytes = self.bucket_bytes.unwrap_or(default.bucket_bytes);
        Ok(EngineOptions {
            strategy: custom.unwrap_or(default.strategy),
            loss_scaling: self.loss_scaling.clone(),
            find_unused_parameters: self.find_unused_parameters,
            detect_anomaly: self.detect_anomaly,
            keep_in_f32: self.keep_in_f32.clone(),
            recompute: self.recompute.clone().unwrap_or(default.recompute),
            first_bucket_bytes: default.first_bucket_bytes.min(bucket_bytes),
            bucket_bytes,
            reduce_dtype: self.reduce_dtype,
            power_sgd: self.power_sgd.clone(),
            gathering: self.gathering.clone(),
            disk: self.disk.clone(),
            ..default
        })
    }
}

impl Sharding {
    fn strategy(&self) -> Box<dyn ShardingStrategy> {
        match self {
            // Another strategy takes its place where there is one of the program's or of FSDP's.
            Self::DataParallel | Self::FullySharded { .. } | Self::Custom(_) => Box::new(DataParallel),
            Self::Zero {
                stage,
                parameters: Tier::Device,
                optimizer_state: Tier::Device,
            } => Box::new(*stage),
            Self::Zero {
                stage,
                parameters,
                optimizer_state,
            } => Box::new(Offloaded {
                strategy: Box::new(*stage),
                parameters: *parameters,
                optimizer_state: *optimizer_state,
            }),
        }
    }
}
