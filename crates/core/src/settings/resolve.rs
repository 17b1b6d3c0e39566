//! From what code, environment and file say to one value.

use super::fully_sharded;
use super::given::Origin;
use super::said::{Said, path};
use super::state::StateSettings;
use super::variables::Variables;
use super::{BatchPlan, Clipping, RunSettings, Sharding, Synchronisation};
use crate::deepspeed::{DataType, DeepSpeedConfig, Fp16, MixedPrecision, Setting, Validation};
use crate::fp8::Fp8Recipe;
use crate::schedule::ScheduleStepping;
use crate::{Checkpoints, Error, GradientCompression, Result};
use candle_core::DType;
use sconce_fsdp::FullyShardedOptions;
use sconce_zero::{BackoffScaling, DiskOptions, Gathering, HysteresisScaling, LossScaling, ParameterSet, UnitPolicy};

/// What code says of a run; what is `None` is for others to say.
#[derive(Debug, Default)]
pub(crate) struct ProgramSettings {
    pub(crate) accumulation_steps: Option<u64>,
    pub(crate) mixed_precision: Option<MixedPrecision>,
    pub(crate) autocast: bool,
    pub(crate) keep_in_f32: ParameterSet,
    pub(crate) recompute: Option<UnitPolicy>,
    pub(crate) fp8: Option<Fp8Recipe>,
    pub(crate) loss_scaling: Option<LossScaling>,
    pub(crate) sync_each_batch: Option<bool>,
    pub(crate) sync_with_dataloader: Option<bool>,
    pub(crate) stepping: ScheduleStepping,
    pub(crate) gradient_clipping: Option<f64>,
    pub(crate) find_unused_parameters: Option<bool>,
    pub(crate) detect_anomaly: bool,
    pub(crate) gradient_compression: Option<GradientCompression>,
    pub(crate) debug_mode: Option<bool>,
    pub(crate) checkpoints: Option<Checkpoints>,
    pub(crate) leaves_frozen: bool,
    pub(crate) saves_on_each_node: bool,
    pub(crate) bucket_bytes: Option<usize>,
    pub(crate) gathering: Option<Gathering>,
    pub(crate) disk: Option<DiskOptions>,
    pub(crate) hidden_size: Option<u64>,
    pub(crate) deepspeed: Option<DeepSpeedConfig>,
    pub(crate) fully_sharded: Option<FullyShardedOptions>,
}

impl ProgramSettings {
    /// Makes the settings of a run on `world_size` ranks; `strategy` is the name of the program's own.
    pub(crate) fn resolve(
        &self,
        strategy: Option<&str>,
        world_size: usize,
        lookup: &dyn Fn(&str) -> Option<String>,
    ) -> Result<RunSettings> {
        let mut variables = Variables::read(lookup)?;
        let fp8_of_variables = std::mem::take(&mut variables.fp8);
        let debug_mode = self.debug_mode.unwrap_or(variables.debug_mode);
        let mut of_variables = variables.fully_sharded.take();
        if let Some(mesh) = variables.mesh {
            of_variables = mesh.applied(of_variables, world_size)?;
        }
        let fully_sharded = fully_sharded::resolve(self, strategy, of_variables, variables.deepspeed.is_some())?;
        let uses_deepspeed = variables.deepspeed.is_some() || self.deepspeed.is_some();
        let named = variables
            .deepspeed
            .as_ref()
            .and_then(|flags| flags.config_file.as_deref());
        let file = match (&self.deepspeed, named) {
            (Some(config), _) => Some(config.clone()),
            (None, Some(path)) => Some(DeepSpeedConfig::read_or_decode(path, Validation::Lenient)?),
            (None, None) => None,
        };
        let said = Said::new(self, variables, file.is_some())?;
        let filled = match &file {
            Some(file) => {
                said.check_against(file)?;
                Some(file.fill_known(&said.auto_values(self.hidden_size))?)
            }
            None => None,
        };
        let batch = batch_plan(&said, file.as_ref(), world_size)?;

        // Without a file, the values that DeepSpeed has where its file says nothing.
        let defaults = DeepSpeedConfig::parse("{}", "DeepSpeed's defaults", Validation::Strict)?;
        let config = filled.as_ref().unwrap_or(&defaults);
        let state = StateSettings::new(&said, filled.as_ref(), uses_deepspeed)?;
        state.check_reduction(config)?;
        let of_policy = fully_sharded.as_ref().and_then(fully_sharded::precision);
        let of_said = said.precision.as_ref().map(|given| given.value);
        let precision = match (of_policy, of_said) {
            (Some(of_policy), Some(said)) if said.base() == of_policy => said,
            (of_policy, said) => of_policy.or(said).unwrap_or_else(|| precision_of(config)),
        };
        let fp8 = (precision == MixedPrecision::Fp8).then(|| self.fp8.clone().unwrap_or(fp8_of_variables));
        fp8.as_ref().map_or(Ok(()), Fp8Recipe::check)?;
        let zero = &config.zero_optimization;
        let unused_in_file = config
            .states("zero_optimization.ignore_unused_parameters")
            .then_some(zero.ignore_unused_parameters);
        let bucket_in_file = config
            .states("zero_optimization.reduce_bucket_size")
            .then(|| zero.reduce_bucket_size.value())
            .flatten()
            .map(|elements| count(elements).saturating_mul(size_of::<f32>()));
        let gathering_in_file = Gathering {
            prefetch_elements: count(zero.prefetch_bucket_size.value().unwrap_or(0)),
            max_live_elements: count(zero.max_live_parameters),
            ..Gathering::default()
        };
        let by_default = match &fully_sharded {
            Some(run) => run.gathering(gathering_in_file),
            None => gathering_in_file,
        };
        let of_policy = fully_sharded.as_ref().and_then(|run| run.precision.reduce_dtype);
        let in_file = config.communication_data_type.map(|kind| match kind {
            DataType::Fp32 => DType::F32,
            DataType::Fp16 => DType::F16,
            DataType::Bf16 => DType::BF16,
        });
        let in_code = self.gradient_compression.as_ref().and_then(GradientCompression::dtype);
        let elsewhere = of_policy.or(in_file);
        if let (Some(code), Some(other)) = (in_code, elsewhere.filter(|other| Some(*other) != in_code)) {
            return Err(Error::Setting {
                setting: "gradient_compression",
                value: code.as_str().into(),
                expected: format!(
                    "gradients travel as {} by the precision policy or communication_data_type; leave out one of the two",
                    other.as_str()
                ),
            });
        }
        let reduce_dtype = in_code.or(elsewhere).unwrap_or(DType::F32);
        let mut notices = state.notices(&said);
        if let Some(name) = strategy
            && (fully_sharded.is_some() || uses_deepspeed)
        {
            notices.push(format!(
                "the program's own sharding strategy, {name}, decides where state lives, not FSDP's or DeepSpeed's settings"
            ));
        }
        if fp8.is_some() {
            notices.push(
                "fp8: products of linear layers are emulated on the CPU: values are rounded to the grid of fp8 and \
                 multiplied as f32, slower than bf16"
                    .into(),
            );
        }
        notices.extend(fully_sharded.iter().flat_map(|run| run.notices().iter().cloned()));
        Ok(RunSettings {
            sharding: match (strategy, &fully_sharded) {
                (Some(name), _) => Sharding::Custom(name.into()),
                (None, Some(run)) => fully_sharded::sharding(run),
                (None, None) => state.sharding(config),
            },
            precision,
            autocast: self.autocast,
            keep_in_f32: self.keep_in_f32.clone(),
            recompute: self.recompute.clone(),
            fp8,
            loss_scaling: self
                .loss_scaling
                .clone()
                .or_else(|| loss_scaling(precision, config, uses_deepspeed)),
            clipping: clipping(&said, file.as_ref(), filled.as_ref()),
            batch,
            synchronisation: Synchronisation {
                with_dataloader: self.sync_with_dataloader.unwrap_or(true),
                each_batch: self.sync_each_batch.unwrap_or(false),
            },
            stepping: self.stepping,
            reduction: config.gradient_allreduce_op,
            find_unused_parameters: self.find_unused_parameters.or(unused_in_file).unwrap_or(false),
            detect_anomaly: self.detect_anomaly,
            bucket_bytes: self.bucket_bytes.or(bucket_in_file),
            debug_mode,
            checkpoints: self.checkpoints.clone(),
            saves_frozen: !self.leaves_frozen,
            saves_on_each_node: self.saves_on_each_node,
            reduce_dtype,
            power_sgd: self
                .gradient_compression
                .as_ref()
                .and_then(GradientCompression::power_sgd)
                .cloned(),
            gathering: self.gathering.clone().unwrap_or(by_default),
            disk: self.disk.clone().or(state.disk(config)?),
            gather_weights_on_save: said.gather_weights_on_save.as_ref().map_or(
                zero.gather_16bit_weights_on_model_save == Setting::Given(true),
                |given| given.value,
            ),
            notices,
            deepspeed: filled,
            fully_sharded,
        })
    }
}

/// Finds the batch sizes as far as they are known before the data loader is.
fn batch_plan(said: &Said, file: Option<&DeepSpeedConfig>, world_size: usize) -> Result<BatchPlan> {
    let steps = said.accumulation_steps.as_ref().map(|given| given.value);
    let Some(file) = file else {
        return Ok(BatchPlan {
            accumulation_steps: steps.unwrap_or(1),
            micro_per_rank: None,
            train: None,
        });
    };
    Ok(file.batch_plan(steps, world_size as u64)?)
}

fn precision_of(config: &DeepSpeedConfig) -> MixedPrecision {
    let on = Setting::Given(true);
    match (config.fp16.enabled == on, config.bf16.enabled == on) {
        (true, _) => MixedPrecision::Fp16,
        (_, true) => MixedPrecision::Bf16,
        _ => MixedPrecision::No,
    }
}

fn loss_scaling(precision: MixedPrecision, config: &DeepSpeedConfig, uses_deepspeed: bool) -> Option<LossScaling> {
    match precision {
        MixedPrecision::No => None,
        MixedPrecision::Fp16 if uses_deepspeed => Some(config.fp16.loss_scaling()),
        MixedPrecision::Fp16 => Some(LossScaling::Backoff(BackoffScaling::default())),
        MixedPrecision::Bf16 | MixedPrecision::Fp8 => {
            (uses_deepspeed && config.bf16.check_grad_overflow).then_some(LossScaling::Static(1.0))
        }
    }
}

impl Fp16 {
    /// Returns the rule of the loss scale.
    fn loss_scaling(&self) -> LossScaling {
        if self.loss_scale > 0.0 {
            return LossScaling::Static(self.loss_scale);
        }
        LossScaling::Hysteresis(HysteresisScaling {
            initial_scale: 2f64.powi(self.initial_scale_power as i32),
            window: self.loss_scale_window,
            hysteresis: u32::try_from(self.hysteresis).unwrap_or(u32::MAX),
            consecutive_hysteresis: self.consecutive_hysteresis,
            minimum: self.min_loss_scale,
            fail_at_minimum: true,
        })
    }
}

fn clipping(said: &Said, file: Option<&DeepSpeedConfig>, filled: Option<&DeepSpeedConfig>) -> Clipping {
    let norm = |norm: f64| (norm > 0.0).then_some(norm);
    if let Some(given) = &said.gradient_clipping {
        return Clipping {
            max_norm: norm(given.value),
            decided_by: Some(given.origin.to_string()),
        };
    }
    let (Some(file), Some(filled)) = (file, filled) else {
        return Clipping::default();
    };
    let place = || Origin::File(file.place(path::CLIPPING)).to_string();
    Clipping {
        max_norm: filled.gradient_clipping.value().and_then(norm),
        decided_by: file.states(path::CLIPPING).then(place),
    }
}

/// A number of elements; what does not fit is more than memory holds.
pub(super) fn count(elements: u64) -> usize {
    usize::try_from(elements).unwrap_or(usize::MAX)
}
