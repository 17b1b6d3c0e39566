//! The variables of the environment that say what a run is, as typed values.

use super::fully_sharded;
use super::given::Given;
use super::mesh::Mesh;
use crate::deepspeed::{MixedPrecision, OffloadDevice};
use crate::environment as variable;
use crate::fp8::Fp8Recipe;
use crate::{Error, Result};
use sconce_fsdp::FullyShardedOptions;
use std::path::PathBuf;

pub(super) const ABOVE_ZERO: &str = "expected a whole number above 0";
const TRUE_OR_FALSE: &str = "expected true or false";
const FROM_ZERO: &str = "expected a number from 0; 0 turns clipping off";

/// What the environment says of a run.
#[derive(Debug, Default)]
pub(super) struct Variables {
    pub(super) accumulation_steps: Option<Given<u64>>,
    pub(super) mixed_precision: Option<Given<MixedPrecision>>,
    pub(super) fp8: Fp8Recipe,
    pub(super) debug_mode: bool,
    /// `None` where DeepSpeed is not asked for; its variables are not looked at then.
    pub(super) deepspeed: Option<DeepSpeedVariables>,
    /// `None` where FSDP is not asked for; its variables are not looked at then.
    pub(super) fully_sharded: Option<FullyShardedOptions>,
    pub(super) mesh: Option<Mesh>,
}

/// Variables that count only where `ACCELERATE_USE_DEEPSPEED` is true.
#[derive(Debug, Default)]
pub(super) struct DeepSpeedVariables {
    pub(super) config_file: Option<PathBuf>,
    pub(super) stage: Option<Given<u64>>,
    pub(super) gradient_clipping: Option<Given<f64>>,
    pub(super) offload_optimizer: Option<Given<OffloadDevice>>,
    pub(super) offload_param: Option<Given<OffloadDevice>>,
    pub(super) optimizer_folder: Option<Given<String>>,
    pub(super) parameter_folder: Option<Given<String>>,
    pub(super) shard_from_creation: Option<Given<bool>>,
    pub(super) gather_weights_on_save: Option<Given<bool>>,
}

impl Variables {
    pub(super) fn read(lookup: &dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let environment = Environment { lookup };
        Ok(Self {
            debug_mode: environment.flag(variable::ACCELERATE_DEBUG_MODE)?.unwrap_or(false),
            accumulation_steps: environment.read(
                variable::ACCELERATE_GRADIENT_ACCUMULATION_STEPS,
                ABOVE_ZERO,
                whole_above_zero,
            )?,
            mixed_precision: environment.read(
                variable::ACCELERATE_MIXED_PRECISION,
                "expected no, bf16, fp16 or fp8",
                precision,
            )?,
            fp8: super::fp8::read(&environment)?,
            deepspeed: DeepSpeedVariables::read(&environment)?,
            fully_sharded: fully_sharded::read(&environment)?,
            mesh: Mesh::read(&environment)?,
        })
    }
}

impl DeepSpeedVariables {
    fn read(environment: &Environment<'_>) -> Result<Option<Self>> {
        let flag = |name| environment.read(name, TRUE_OR_FALSE, true_or_false);
        if !flag(variable::ACCELERATE_USE_DEEPSPEED)?.is_some_and(|used| used.value) {
            return Ok(None);
        }
        let device = |name| environment.read(name, "expected none, cpu or nvme", offload_device);
        // Accelerate writes `none` where there is no path.
        let path = |name| {
            let text = environment.text(name).filter(|text| text != "none");
            text.map(|text| Given::by_variable(name, text))
        };
        let clipping = environment.read(variable::ACCELERATE_GRADIENT_CLIPPING, FROM_ZERO, |text| match text {
            "none" => Some(None),
            number => number
                .parse()
                .ok()
                .filter(|norm: &f64| *norm >= 0.0 && norm.is_finite())
                .map(Some),
        })?;
        Ok(Some(Self {
            config_file: path(variable::ACCELERATE_DEEPSPEED_CONFIG_FILE).map(|given| given.value.into()),
            stage: environment.read(
                variable::ACCELERATE_DEEPSPEED_ZERO_STAGE,
                "expected 0, 1, 2 or 3",
                |text| text.parse().ok().filter(|stage| *stage <= 3),
            )?,
            gradient_clipping: clipping.and_then(|given| {
                let origin = given.origin;
                given.value.map(|value| Given { value, origin })
            }),
            offload_optimizer: device(variable::ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE)?,
            offload_param: device(variable::ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE)?,
            optimizer_folder: path(variable::ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH),
            parameter_folder: path(variable::ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH),
            shard_from_creation: flag(variable::ACCELERATE_DEEPSPEED_ZERO3_INIT)?,
            gather_weights_on_save: flag(variable::ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL)?,
        }))
    }
}

/// An environment as a function from name to value; a value of blanks only is none.
pub(crate) struct Environment<'a> {
    pub(crate) lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Environment<'_> {
    /// Returns a whole number above 0.
    pub(crate) fn above_zero(&self, name: &'static str) -> Result<Option<u64>> {
        self.value(name, ABOVE_ZERO, whole_above_zero)
    }

    /// Returns whether something is true, if a variable says so.
    pub(crate) fn flag(&self, name: &'static str) -> Result<Option<bool>> {
        self.value(name, TRUE_OR_FALSE, true_or_false)
    }

    /// Reads a variable whose name is not needed with its value.
    pub(crate) fn value<T>(
        &self,
        name: &'static str,
        expected: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>> {
        let given = self.read(name, expected, parse)?;
        Ok(given.map(|given| given.value))
    }

    /// Returns the text of a variable without blanks around it.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name)
            .map(|value| value.trim().to_owned())
            .filter(|value| !value.is_empty())
    }

    /// Reads a variable that one value can be parsed from.
    pub(super) fn read<T>(
        &self,
        name: &'static str,
        expected: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<Given<T>>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match parse(&text) {
            Some(value) => Ok(Some(Given::by_variable(name, value))),
            None => Err(Error::Setting {
                setting: name,
                value: text,
                expected: expected.into(),
            }),
        }
    }
}

fn whole_above_zero(text: &str) -> Option<u64> {
    text.parse().ok().filter(|number| *number > 0)
}

fn precision(text: &str) -> Option<MixedPrecision> {
    match text.to_ascii_lowercase().as_str() {
        "no" => Some(MixedPrecision::No),
        "bf16" => Some(MixedPrecision::Bf16),
        "fp16" => Some(MixedPrecision::Fp16),
        "fp8" => Some(MixedPrecision::Fp8),
        _ => None,
    }
}

/// Reads Accelerate's spellings of a yes or no.
pub(crate) fn true_or_false(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "y" | "t" | "on" => Some(true),
        "false" | "0" | "no" | "n" | "f" | "off" => Some(false),
        _ => None,
    }
}

fn offload_device(text: &str) -> Option<OffloadDevice> {
    match text.to_ascii_lowercase().as_str() {
        "none" => Some(OffloadDevice::None),
        "cpu" => Some(OffloadDevice::Cpu),
        "nvme" => Some(OffloadDevice::Nvme),
        _ => None,
    }
}
