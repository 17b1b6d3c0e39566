//! The section `scheduler`.

use super::error::ConfigError;
use super::json::Node;
use super::optimizer::one_of;
use super::section::{AutoRule, Section};
use super::{Setting, Warning};
use crate::schedule::{
    Beta1Cycle, LrRangeTest, OneCycle, Schedule, WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupType,
};

/// Which of DeepSpeed's schedules, with which numbers.
#[derive(Debug, Clone, PartialEq)]
pub enum SchedulerSection {
    /// `LRRangeTest`.
    LrRangeTest(LrRangeTest),
    /// `OneCycle`.
    OneCycle(OneCycle),
    /// `WarmupLR`.
    WarmupLr(WarmupSection),
    /// `WarmupDecayLR`.
    WarmupDecayLr {
        /// The rise.
        warmup: WarmupSection,
        /// Optimizer steps of the run: `total_num_steps`.
        total_steps: Setting<u64>,
    },
    /// `WarmupCosineLR`.
    WarmupCosineLr {
        /// Optimizer steps of the run: `total_num_steps`.
        total_steps: Setting<u64>,
        /// Optimizer steps of the rise: `warmup_num_steps`.
        warmup_steps: Setting<u64>,
        /// The share of the optimizer's rate at which the rise begins: `warmup_min_ratio`.
        warmup_minimum: f64,
        /// The share of the optimizer's rate at the end: `cos_min_ratio`.
        cosine_minimum: f64,
        /// The form of the rise: `warmup_type`.
        warmup_type: WarmupType,
    },
}

/// The numbers of a warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WarmupSection {
    /// `warmup_min_lr`.
    pub minimum: Setting<f64>,
    /// `warmup_max_lr`; by default the optimizer's rate.
    pub maximum: Option<Setting<f64>>,
    /// `warmup_num_steps`.
    pub warmup_steps: Setting<u64>,
    /// `warmup_type`.
    pub warmup_type: WarmupType,
}

const NAMES: [&str; 5] = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"];

impl SchedulerSection {
    /// Makes the schedule.
    ///
    /// # Errors
    /// [`ConfigError::StillAuto`] when a number is still `"auto"`.
    pub fn schedule(&self) -> Result<Box<dyn Schedule>, ConfigError> {
        let total = |steps: Setting<u64>| steps.filled("scheduler.params.total_num_steps");
        Ok(match self {
            Self::LrRangeTest(schedule) => Box::new(*schedule),
            Self::OneCycle(schedule) => Box::new(*schedule),
            Self::WarmupLr(warmup) => Box::new(warmup.schedule()?),
            Self::WarmupDecayLr { warmup, total_steps } => Box::new(WarmupDecayLr {
                warmup: warmup.schedule()?,
                total_steps: total(*total_steps)?,
            }),
            Self::WarmupCosineLr {
                total_steps,
                warmup_steps,
                warmup_minimum,
                cosine_minimum,
                warmup_type,
            } => Box::new(WarmupCosineLr {
                total_steps: total(*total_steps)?,
                warmup_minimum: *warmup_minimum,
                warmup_steps: warmup_steps.filled("scheduler.params.warmup_num_steps")?,
                cosine_minimum: *cosine_minimum,
                warmup_type: *warmup_type,
            }),
        })
    }

    pub(super) fn read(top: &mut Section<'_>) -> Result<Option<Self>, ConfigError> {
        let Some(mut section) = top.child("scheduler", AutoRule::Refused)? else {
            return Ok(None);
        };
        let name = section.required::<String>("type")?;
        if !NAMES.contains(&name.as_str()) {
            return Err(section.invalid("type", one_of(&name, &NAMES)));
        }
        let empty = Node::Object(Vec::new());
        let mut parameters = match section.child("params", AutoRule::Refused)? {
            Some(parameters) => parameters,
            None => section.absent("params", &empty)?,
        };
        let scheduler = match name.as_str() {
            "LRRangeTest" => read_range_test(&mut parameters)?,
            "OneCycle" => read_one_cycle(&mut parameters)?,
            "WarmupLR" => Self::WarmupLr(WarmupSection::read(&mut parameters)?),
            "WarmupDecayLR" => Self::WarmupDecayLr {
                warmup: WarmupSection::read(&mut parameters)?,
                total_steps: total_steps(&mut parameters)?,
            },
            _ => Self::WarmupCosineLr {
                total_steps: total_steps(&mut parameters)?,
                warmup_steps: warmup_steps(&mut parameters)?,
                warmup_minimum: at_least_zero(&mut parameters, "warmup_min_ratio", 0.0)?,
                cosine_minimum: at_least_zero(&mut parameters, "cos_min_ratio", 1e-4)?,
                warmup_type: warmup_type(&mut parameters)?,
            },
        };
        parameters.no_effect(&["last_batch_iteration"]);
        parameters.finish()?;
        section.finish()?;
        Ok(Some(scheduler))
    }
}

impl WarmupSection {
    fn schedule(&self) -> Result<WarmupLr, ConfigError> {
        let maximum = self
            .maximum
            .map(|maximum| maximum.filled("scheduler.params.warmup_max_lr"));
        Ok(WarmupLr {
            minimum: self.minimum.filled("scheduler.params.warmup_min_lr")?,
            maximum: maximum.transpose()?,
            warmup_steps: self.warmup_steps.filled("scheduler.params.warmup_num_steps")?,
            warmup_type: self.warmup_type,
        })
    }

    fn read(section: &mut Section<'_>) -> Result<Self, ConfigError> {
        let minimum = section.setting("warmup_min_lr", 0.0)?;
        check_rate(section, "warmup_min_lr", minimum.value())?;
        let maximum = section.optional_setting("warmup_max_lr")?;
        check_rate(section, "warmup_max_lr", maximum.and_then(Setting::value))?;
        Ok(Self {
            minimum,
            maximum,
            warmup_steps: warmup_steps(section)?,
            warmup_type: warmup_type(section)?,
        })
    }
}

fn read_range_test(section: &mut Section<'_>) -> Result<SchedulerSection, ConfigError> {
    let default = LrRangeTest::default();
    let step_size = section.value("lr_range_test_step_size", default.step_size)?;
    section.check(
        step_size > 0,
        "lr_range_test_step_size",
        "steps, a whole number above 0",
    )?;
    Ok(SchedulerSection::LrRangeTest(LrRangeTest {
        minimum: at_least_zero(section, "lr_range_test_min_lr", default.minimum)?,
        step_size,
        step_rate: at_least_zero(section, "lr_range_test_step_rate", default.step_rate)?,
        staircase: section.value("lr_range_test_staircase", default.staircase)?,
    }))
}

fn read_one_cycle(section: &mut Section<'_>) -> Result<SchedulerSection, ConfigError> {
    let minimum = section.required("cycle_min_lr")?;
    check_rate(section, "cycle_min_lr", Some(minimum))?;
    let maximum = section.required("cycle_max_lr")?;
    check_rate(section, "cycle_max_lr", Some(maximum))?;
    let default = OneCycle::new(minimum, maximum);
    let cycle = Beta1Cycle::default();
    let rising_steps = section.value("cycle_first_step_size", default.rising_steps)?;
    section.check(
        rising_steps > 0,
        "cycle_first_step_size",
        "steps, a whole number above 0",
    )?;
    let cycle = Beta1Cycle {
        minimum: at_least_zero(section, "cycle_min_mom", cycle.minimum)?,
        maximum: at_least_zero(section, "cycle_max_mom", cycle.maximum)?,
        decay_rate: at_least_zero(section, "decay_mom_rate", cycle.decay_rate)?,
    };
    Ok(SchedulerSection::OneCycle(OneCycle {
        decay_rate: at_least_zero(section, "decay_lr_rate", default.decay_rate)?,
        rising_steps,
        falling_steps: section.optional("cycle_second_step_size")?,
        rising_stairs: section.value("cycle_first_stair_count", 0)?,
        falling_stairs: section.optional("cycle_second_stair_count")?,
        decay_steps: section.value("decay_step_size", 0)?,
        beta1: section.value("cycle_momentum", true)?.then_some(cycle),
        ..default
    }))
}

fn total_steps(section: &mut Section<'_>) -> Result<Setting<u64>, ConfigError> {
    let steps = section.optional_setting("total_num_steps")?;
    steps.ok_or_else(|| section.missing("total_num_steps", "the optimizer steps of the run"))
}

fn warmup_steps(section: &mut Section<'_>) -> Result<Setting<u64>, ConfigError> {
    let steps = section.setting("warmup_num_steps", 1000)?;
    section.check(
        steps != Setting::Given(0),
        "warmup_num_steps",
        "steps, a whole number above 0",
    )?;
    Ok(steps)
}

fn warmup_type(section: &mut Section<'_>) -> Result<WarmupType, ConfigError> {
    let Some(name) = section.optional::<String>("warmup_type")? else {
        return Ok(WarmupType::Log);
    };
    Ok(match name.as_str() {
        "log" => WarmupType::Log,
        "linear" => WarmupType::Linear,
        _ => {
            section.source().warn(Warning::Replaced {
                path: section.path("warmup_type"),
                found: format!("{name:?}, expected \"log\" or \"linear\""),
                used: "\"log\"".into(),
            });
            WarmupType::Log
        }
    })
}

fn at_least_zero(section: &mut Section<'_>, key: &'static str, default: f64) -> Result<f64, ConfigError> {
    let value = section.value(key, default)?;
    check_rate(section, key, Some(value))?;
    Ok(value)
}

fn check_rate(section: &Section<'_>, key: &str, value: Option<f64>) -> Result<(), ConfigError> {
    section.check(value.is_none_or(|value| value >= 0.0), key, "a number from 0")
}
