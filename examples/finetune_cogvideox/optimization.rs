//! The update rule and the learning rates: from the arguments, or from the sections of a DeepSpeed configuration.

use sconce_core::deepspeed::{
    ConfigError, ConfiguredOptimizer, ConfiguredSchedule, DeepSpeedConfig, OptimizerSource, ScheduleSource,
};
use sconce_core::schedule::{
    ConstantSchedule, ConstantWithWarmup, CosineSchedule, CosineWithRestartsSchedule, LinearSchedule,
    PolynomialSchedule,
};
use sconce_core::{Adam, AdamW, OptimizerRule, RunSettings, Schedule};

use crate::arguments::{Arguments, OptimizerName, ScheduleName};

/// An update rule of the arguments', or the configuration's with the arguments' numbers for `"auto"`.
pub(crate) enum Rule {
    Own(Box<dyn OptimizerRule>),
    Configured(ConfiguredOptimizer),
}

impl Rule {
    pub(crate) fn new(arguments: &Arguments, settings: &RunSettings) -> Self {
        let &Arguments {
            learning_rate,
            beta1,
            beta2,
            epsilon,
            weight_decay,
            ..
        } = arguments;
        if settings
            .deepspeed
            .as_ref()
            .is_some_and(|config| config.optimizer.is_some())
        {
            return Self::Configured(ConfiguredOptimizer {
                learning_rate: Some(learning_rate),
                betas: Some((beta1, beta2)),
                epsilon: Some(epsilon),
                weight_decay: Some(weight_decay),
            });
        }
        Self::Own(match arguments.optimizer {
            OptimizerName::Adam => Box::new(Adam {
                learning_rate,
                beta1,
                beta2,
                epsilon,
                weight_decay,
                ..Adam::default()
            }),
            OptimizerName::Adamw => Box::new(AdamW {
                learning_rate,
                beta1,
                beta2,
                epsilon,
                weight_decay,
                ..AdamW::default()
            }),
        })
    }
}

impl OptimizerSource for Rule {
    fn configured(&self) -> Option<ConfiguredOptimizer> {
        match self {
            Self::Own(_) => None,
            Self::Configured(configured) => Some(*configured),
        }
    }

    fn into_rule(self, config: Option<&DeepSpeedConfig>) -> Result<Box<dyn OptimizerRule>, ConfigError> {
        match self {
            Self::Own(rule) => Ok(rule),
            Self::Configured(configured) => configured.into_rule(config),
        }
    }
}

/// Learning rates of the arguments', or the configuration's.
pub(crate) enum Rates {
    Own(Box<dyn Schedule>),
    Configured(ConfiguredSchedule),
}

impl Rates {
    /// Steps are counted as they are: CogVideoX's trainer multiplies them by the number of ranks, because its scheduler advances
    /// that often in each.
    pub(crate) fn new(arguments: &Arguments, settings: &RunSettings, total_steps: u64) -> Self {
        let warmup_steps = arguments.lr_warmup_steps;
        if settings
            .deepspeed
            .as_ref()
            .is_some_and(|config| config.scheduler.is_some())
        {
            return Self::Configured(ConfiguredSchedule {
                warmup_steps: Some(warmup_steps),
                total_steps: Some(total_steps),
            });
        }
        Self::Own(match arguments.lr_scheduler {
            ScheduleName::Constant => Box::new(ConstantSchedule),
            ScheduleName::ConstantWithWarmup => Box::new(ConstantWithWarmup { warmup_steps }),
            ScheduleName::Linear => Box::new(LinearSchedule {
                warmup_steps,
                total_steps,
            }),
            ScheduleName::Cosine => Box::new(CosineSchedule {
                warmup_steps,
                total_steps,
                cycles: 0.5,
            }),
            ScheduleName::CosineWithRestarts => Box::new(CosineWithRestartsSchedule {
                warmup_steps,
                total_steps,
                cycles: arguments.lr_num_cycles,
            }),
            ScheduleName::Polynomial => Box::new(PolynomialSchedule {
                warmup_steps,
                total_steps,
                power: arguments.lr_power,
                end: 1e-7,
            }),
        })
    }
}

impl ScheduleSource for Rates {
    type Schedule = Box<dyn Schedule>;

    fn configured(&self) -> Option<ConfiguredSchedule> {
        match self {
            Self::Own(_) => None,
            Self::Configured(configured) => Some(*configured),
        }
    }

    fn into_schedule(self, config: Option<&DeepSpeedConfig>) -> Result<Self::Schedule, ConfigError> {
        match self {
            Self::Own(schedule) => Ok(schedule),
            Self::Configured(configured) => configured.into_schedule(config),
        }
    }
}
