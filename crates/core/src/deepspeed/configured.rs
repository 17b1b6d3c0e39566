//! Taking optimizer and schedule from the configuration: what Accelerate's `DummyOptim` and `DummyScheduler` stand for.

use super::error::ConfigError;
use super::{AutoValues, DeepSpeedConfig, SchedulerSection};
use crate::schedule::Schedule;
use sconce_zero::OptimizerRule;

/// Stands for the optimizer of the configuration's section `optimizer` in `prepare` of an
/// [`Accelerator`](crate::Accelerator).
///
/// The numbers stand for `"auto"` in the section; a number that the section gives differently is an error. Those that
/// are `None` are the section's to give.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ConfiguredOptimizer {
    /// For `params.lr`.
    pub learning_rate: Option<f64>,
    /// For `params.betas`.
    pub betas: Option<(f64, f64)>,
    /// For `params.eps`.
    pub epsilon: Option<f64>,
    /// For `params.weight_decay`.
    pub weight_decay: Option<f64>,
}

/// Stands for the schedule of the configuration's section `scheduler`, beside a [`ConfiguredOptimizer`].
///
/// The numbers stand for `"auto"` in the section. They count optimizer steps of the run: unlike in Accelerate, none is
/// divided by the number of ranks. `warmup_min_lr` is 0 where it is `"auto"`, `warmup_max_lr` the optimizer's rate.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConfiguredSchedule {
    /// For `params.warmup_num_steps`.
    pub warmup_steps: Option<u64>,
    /// For `params.total_num_steps`.
    pub total_steps: Option<u64>,
}

/// What gives `prepare` its optimizer: an [`OptimizerRule`], or a [`ConfiguredOptimizer`].
pub trait OptimizerSource {
    /// Returns the stand-in, if this is one.
    fn configured(&self) -> Option<ConfiguredOptimizer>;

    /// Makes the rule; `config` is the configuration in use, with nothing left `"auto"`.
    ///
    /// # Errors
    /// [`ConfigError::NoSection`] for a stand-in without a section `optimizer`.
    fn into_rule(self, config: Option<&DeepSpeedConfig>) -> Result<Box<dyn OptimizerRule>, ConfigError>;
}

/// What gives `prepare` its schedule: a [`Schedule`], or a [`ConfiguredSchedule`].
pub trait ScheduleSource {
    /// What it gives.
    type Schedule: Schedule;

    /// Returns the stand-in, if this is one.
    fn configured(&self) -> Option<ConfiguredSchedule>;

    /// Makes the schedule; `config` is the configuration in use, with nothing left `"auto"`.
    ///
    /// # Errors
    /// [`ConfigError::NoSection`] for a stand-in without a section `scheduler`, [`ConfigError::Unsupported`] for a cycle
    /// of the first beta.
    fn into_schedule(self, config: Option<&DeepSpeedConfig>) -> Result<Self::Schedule, ConfigError>;
}

impl<R: OptimizerRule + 'static> OptimizerSource for R {
    fn configured(&self) -> Option<ConfiguredOptimizer> {
        None
    }

    fn into_rule(self, _: Option<&DeepSpeedConfig>) -> Result<Box<dyn OptimizerRule>, ConfigError> {
        Ok(Box::new(self))
    }
}

impl OptimizerSource for ConfiguredOptimizer {
    fn configured(&self) -> Option<Self> {
        Some(*self)
    }

    fn into_rule(self, config: Option<&DeepSpeedConfig>) -> Result<Box<dyn OptimizerRule>, ConfigError> {
        match config.and_then(|config| config.optimizer.as_ref()) {
            Some(section) => section.rule(),
            None => Err(no_section(config, "ConfiguredOptimizer", "optimizer")),
        }
    }
}

impl<S: Schedule> ScheduleSource for S {
    type Schedule = S;

    fn configured(&self) -> Option<ConfiguredSchedule> {
        None
    }

    fn into_schedule(self, _: Option<&DeepSpeedConfig>) -> Result<S, ConfigError> {
        Ok(self)
    }
}

impl ScheduleSource for ConfiguredSchedule {
    type Schedule = Box<dyn Schedule>;

    fn configured(&self) -> Option<Self> {
        Some(*self)
    }

    fn into_schedule(self, config: Option<&DeepSpeedConfig>) -> Result<Self::Schedule, ConfigError> {
        let section = config.and_then(|config| Some((config, config.scheduler.as_ref()?)));
        let Some((config, section)) = section else {
            return Err(no_section(config, "ConfiguredSchedule", "scheduler"));
        };
        if let SchedulerSection::OneCycle(cycle) = section
            && cycle.beta1.is_some()
        {
            return Err(ConfigError::Unsupported {
                place: config.place("scheduler.params.cycle_momentum"),
                found: "true, the default,".into(),
                advice: "the first beta stays as it is; set it to false".into(),
            });
        }
        section.schedule()
    }
}

fn no_section(config: Option<&DeepSpeedConfig>, stand_in: &'static str, section: &'static str) -> ConfigError {
    ConfigError::NoSection {
        file: config.map(|config| config.file().into()),
        stand_in,
        section,
    }
}

/// Returns the configuration with everything that `prepare` knows in the places of `"auto"`.
///
/// # Errors
/// [`ConfigError::SectionAndProgram`] for a section whose stand-in the program does not give,
/// [`ConfigError::ScheduleAlone`], [`ConfigError::Mismatches`], [`ConfigError::StillAuto`].
pub(crate) fn fill(
    config: Option<&DeepSpeedConfig>,
    known: AutoValues,
    optimizer: Option<ConfiguredOptimizer>,
    schedule: Option<ConfiguredSchedule>,
) -> Result<Option<DeepSpeedConfig>, ConfigError> {
    if optimizer.is_none() && schedule.is_some() {
        return Err(ConfigError::ScheduleAlone);
    }
    let Some(config) = config else { return Ok(None) };
    for (section, stand_in, is_twice) in [
        (
            "optimizer",
            "ConfiguredOptimizer",
            config.optimizer.is_some() && optimizer.is_none(),
        ),
        (
            "scheduler",
            "ConfiguredSchedule",
            config.scheduler.is_some() && schedule.is_none(),
        ),
    ] {
        if is_twice {
            let place = config.place(section);
            return Err(ConfigError::SectionAndProgram { place, stand_in });
        }
    }
    let (optimizer, schedule) = (optimizer.unwrap_or_default(), schedule.unwrap_or_default());
    let values = AutoValues {
        learning_rate: optimizer.learning_rate,
        betas: optimizer.betas,
        epsilon: optimizer.epsilon,
        weight_decay: optimizer.weight_decay,
        warmup_steps: schedule.warmup_steps,
        total_steps: schedule.total_steps,
        ..known
    };
    config.fill(&values).map(Some)
}
