//! What code and environment say together, and whether a configuration file says otherwise.

use super::ProgramSettings;
use super::given::{Given, Origin};
use super::variables::{ABOVE_ZERO, Variables};
use crate::deepspeed::{AutoValues, DeepSpeedConfig, MixedPrecision, OffloadDevice, Setting};
use crate::{Error, Result};
use std::fmt::Display;

/// What code says, else the environment; what is `None` is for the file to say.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) accumulation_steps: Option<Given<u64>>,
    pub(super) gradient_clipping: Option<Given<f64>>,
    pub(super) precision: Option<Given<MixedPrecision>>,
    pub(super) stage: Option<Given<u64>>,
    pub(super) offload_optimizer: Option<Given<OffloadDevice>>,
    pub(super) optimizer_folder: Option<Given<String>>,
    pub(super) offload_param: Option<Given<OffloadDevice>>,
    pub(super) parameter_folder: Option<Given<String>>,
    pub(super) gather_weights_on_save: Option<Given<bool>>,
    pub(super) shard_from_creation: Option<Given<bool>>,
}

/// Paths of the keys that code or environment may set too.
pub(super) mod path {
    pub(crate) const ACCUMULATION: &str = "gradient_accumulation_steps";
    pub(crate) const CLIPPING: &str = "gradient_clipping";
    pub(crate) const STAGE: &str = "zero_optimization.stage";
    pub(crate) const OPTIMIZER_DEVICE: &str = "zero_optimization.offload_optimizer.device";
    pub(crate) const OPTIMIZER_FOLDER: &str = "zero_optimization.offload_optimizer.nvme_path";
    pub(crate) const PARAMETER_DEVICE: &str = "zero_optimization.offload_param.device";
    pub(crate) const PARAMETER_FOLDER: &str = "zero_optimization.offload_param.nvme_path";
    pub(crate) const GATHER_ON_SAVE: &str = "zero_optimization.stage3_gather_16bit_weights_on_model_save";
    pub(crate) const FP16: &str = "fp16.enabled";
    pub(crate) const BF16: &str = "bf16.enabled";
}

impl Said {
    pub(super) fn new(program: &ProgramSettings, variables: Variables, has_file: bool) -> Result<Self> {
        let steps = program
            .accumulation_steps
            .map(|steps| Given::by_code("gradient_accumulation_steps", steps));
        if let Some(given) = steps.as_ref().filter(|given| given.value == 0) {
            return Err(given.origin.refuse(0, ABOVE_ZERO));
        }
        let clipping = program
            .gradient_clipping
            .map(|norm| Given::by_code("gradient_clipping", norm));
        if let Some(given) = &clipping
            && !(given.value >= 0.0 && given.value.is_finite())
        {
            return Err(given
                .origin
                .refuse(given.value, "expected a number from 0; 0 turns clipping off"));
        }
        let precision = program
            .mixed_precision
            .map(|precision| Given::by_code("mixed_precision", precision));
        // Accelerate's launcher always says something; `no` must not overrule a file.
        let from_launcher = variables
            .mixed_precision
            .filter(|given| !(has_file && given.value == MixedPrecision::No));
        let flags = variables.deepspeed.unwrap_or_default();
        Ok(Self {
            accumulation_steps: steps.or(variables.accumulation_steps),
            gradient_clipping: clipping.or(flags.gradient_clipping),
            precision: precision.or(from_launcher),
            stage: flags.stage,
            offload_optimizer: flags.offload_optimizer,
            optimizer_folder: flags.optimizer_folder,
            offload_param: flags.offload_param,
            parameter_folder: flags.parameter_folder,
            gather_weights_on_save: flags.gather_weights_on_save,
            shard_from_creation: flags.shard_from_creation,
        })
    }

    /// Returns what stands for `"auto"` in a file before data and optimizer are known.
    pub(super) fn auto_values(&self, hidden_size: Option<u64>) -> AutoValues {
        AutoValues {
            gradient_accumulation_steps: value(&self.accumulation_steps),
            gradient_clipping: value(&self.gradient_clipping),
            mixed_precision: value(&self.precision),
            zero_stage: value(&self.stage),
            offload_optimizer_device: value(&self.offload_optimizer),
            offload_param_device: value(&self.offload_param),
            gather_weights_on_save: value(&self.gather_weights_on_save),
            hidden_size,
            ..AutoValues::default()
        }
    }

    /// Fails where the file itself gives another value: one message lists all.
    pub(super) fn check_against(&self, file: &DeepSpeedConfig) -> Result<()> {
        let mut differences = Differences { file, list: Vec::new() };
        let zero = &file.zero_optimization;
        let (on_optimizer, on_parameters) = (&zero.offload_optimizer, &zero.offload_param);
        let steps = file.gradient_accumulation_steps.and_then(Setting::value);
        differences.find(&self.accumulation_steps, path::ACCUMULATION, steps);
        differences.find(&self.gradient_clipping, path::CLIPPING, file.gradient_clipping.value());
        differences.find(&self.stage, path::STAGE, zero.stage.value());
        let device = on_optimizer.device.value();
        differences.find(&self.offload_optimizer, path::OPTIMIZER_DEVICE, device);
        let device = on_parameters.device.value();
        differences.find(&self.offload_param, path::PARAMETER_DEVICE, device);
        let folder = on_optimizer.nvme_path.clone();
        differences.find(&self.optimizer_folder, path::OPTIMIZER_FOLDER, folder);
        let folder = on_parameters.nvme_path.clone();
        differences.find(&self.parameter_folder, path::PARAMETER_FOLDER, folder);
        let gather = zero.gather_16bit_weights_on_model_save.value();
        differences.find(&self.gather_weights_on_save, path::GATHER_ON_SAVE, gather);
        for (key, precision, enabled) in [
            (path::FP16, MixedPrecision::Fp16, file.fp16.enabled),
            (path::BF16, MixedPrecision::Bf16, file.bf16.enabled),
        ] {
            if let Some(given) = &self.precision
                && let Some(enabled) = enabled.value()
                && enabled != (given.value.base() == precision)
            {
                differences.note(&given.origin, &given.value, key);
            }
        }
        differences.into_result()
    }
}

/// What the file says otherwise.
struct Differences<'a> {
    file: &'a DeepSpeedConfig,
    list: Vec<String>,
}

impl Differences<'_> {
    fn find<T: PartialEq + Display>(&mut self, said: &Option<Given<T>>, key: &str, in_file: Option<T>) {
        if let (Some(given), Some(in_file)) = (said, in_file)
            && given.value != in_file
        {
            self.note(&given.origin, &given.value, key);
        }
    }

    /// Notes a difference at a key for which the file itself has a value; a default gives way.
    fn note(&mut self, origin: &Origin, value: &dyn Display, key: &str) {
        if let Some(in_file) = self.file.stated(key) {
            self.list.push(format!("{origin} is {value}, `{key}` is {in_file}"));
        }
    }

    fn into_result(self) -> Result<()> {
        if self.list.is_empty() {
            return Ok(());
        }
        Err(Error::Contradictions {
            file: self.file.file().into(),
            list: self.list,
        })
    }
}

fn value<T: Copy>(given: &Option<Given<T>>) -> Option<T> {
    given.as_ref().map(|given| given.value)
}
