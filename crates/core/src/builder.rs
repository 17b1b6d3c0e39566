//! Making an accelerator: settings from code, then from the environment, then defaults.

use crate::accumulation::Accumulation;
use crate::environment as variable;
use crate::managed::ManagedAccelerator;
use crate::{Accelerator, Error, Result};
use candle_core::Device;
use sconce_collectives::{Options, World, connect};
use sconce_zero::{DataParallel, Engine, EngineOptions, LossScaling, ShardingStrategy, ZeroStage};
use std::path::PathBuf;
use std::time::Duration;

const ABOVE_ZERO: &str = "expected a whole number above 0";

/// Makes the accelerator that `sconce launch` and the environment describe.
///
/// # Errors
/// A variable that cannot be used, ranks that do not come.
pub fn accelerator() -> Result<Box<dyn Accelerator>> {
    AcceleratorBuilder::default().build()
}

/// Settings of an accelerator; what is not set here is read from the environment, then takes its default.
#[derive(Debug, Default)]
pub struct AcceleratorBuilder {
    gradient_accumulation_steps: Option<u64>,
    seed: Option<u64>,
    strategy: Option<Box<dyn ShardingStrategy>>,
    find_unused_parameters: bool,
    loss_scaling: Option<LossScaling>,
    timeout: Option<Duration>,
    connection: Option<(World, std::sync::Arc<dyn sconce_collectives::Communicator>)>,
}

impl AcceleratorBuilder {
    /// Sets over how many micro-batches gradients add up before a step; 1 by default.
    #[must_use]
    pub fn gradient_accumulation_steps(mut self, steps: u64) -> Self {
        self.gradient_accumulation_steps = Some(steps);
        self
    }

    /// Sets the seed of shuffling; 0 by default.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets where parameters, gradients and optimizer state live; by default the ZeRO stage that the environment asks
    /// for, or [`DataParallel`].
    #[must_use]
    pub fn strategy(mut self, strategy: impl ShardingStrategy + 'static) -> Self {
        self.strategy = Some(Box::new(strategy));
        self
    }

    /// Allows parameters that get no gradient.
    #[must_use]
    pub fn find_unused_parameters(mut self, allow: bool) -> Self {
        self.find_unused_parameters = allow;
        self
    }

    /// Sets how losses are scaled; by default they are not.
    #[must_use]
    pub fn loss_scaling(mut self, scaling: LossScaling) -> Self {
        self.loss_scaling = Some(scaling);
        self
    }

    /// Sets how long a collective waits for its peers; 30 minutes by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Uses a group of ranks that exists already, for ranks as threads and for other launchers.
    #[must_use]
    pub fn communicator(mut self, communicator: std::sync::Arc<dyn sconce_collectives::Communicator>) -> Self {
        let world = World {
            rank: communicator.rank(),
            size: communicator.size(),
            local_rank: communicator.rank(),
            local_size: communicator.size(),
            ..World::single()
        };
        self.connection = Some((world, communicator));
        self
    }

    /// Joins the other ranks and makes the accelerator.
    ///
    /// # Errors
    /// [`Error::Setting`] for a setting that cannot be used; errors of the world and of the group.
    pub fn build(self) -> Result<Box<dyn Accelerator>> {
        self.build_with(sconce_collectives::environment::of_process)
    }

    /// Does what [`AcceleratorBuilder::build`] does with an environment given as a function from name to value.
    ///
    /// # Errors
    /// As [`AcceleratorBuilder::build`].
    pub fn build_with(self, lookup: impl Fn(&str) -> Option<String>) -> Result<Box<dyn Accelerator>> {
        let (setting, steps) = match self.gradient_accumulation_steps {
            Some(steps) => ("gradient_accumulation_steps", Some(steps)),
            None => {
                let variable = variable::ACCELERATE_GRADIENT_ACCUMULATION_STEPS;
                (variable, number(&lookup, variable)?)
            }
        };
        let steps = above_zero(setting, steps)?.unwrap_or(1);
        check_precision(lookup(variable::ACCELERATE_MIXED_PRECISION))?;
        let seconds = above_zero(variable::SCONCE_TIMEOUT, number(&lookup, variable::SCONCE_TIMEOUT)?)?;
        let timeout = self.timeout.or(seconds.map(Duration::from_secs));
        let folder = lookup(variable::SCONCE_FLIGHT_RECORDER).map_or_else(std::env::temp_dir, PathBuf::from);
        let options = Options {
            timeout: timeout.unwrap_or(Options::default().timeout),
            flight_recorder: Some(folder),
        };
        let strategy = match self.strategy {
            Some(strategy) => strategy,
            None => strategy(&lookup)?,
        };
        let (world, communicator, connection) = match self.connection {
            Some((world, communicator)) => (world, communicator, None),
            None => {
                let world = World::from_lookup(&lookup)?;
                let connection = connect(&world, &options)?;
                (world, std::sync::Arc::clone(&connection.communicator), Some(connection))
            }
        };
        let engine = Engine::new(
            communicator,
            EngineOptions {
                strategy,
                find_unused_parameters: self.find_unused_parameters,
                loss_scaling: self.loss_scaling,
                ..EngineOptions::default()
            },
        )?;
        let seed = self.seed.unwrap_or(0);
        Ok(Box::new(ManagedAccelerator::new(
            world,
            connection,
            engine,
            Device::Cpu,
            seed,
            Accumulation::new(steps),
        )))
    }
}

fn number(lookup: &impl Fn(&str) -> Option<String>, name: &'static str) -> Result<Option<u64>> {
    let Some(value) = lookup(name).filter(|value| !value.trim().is_empty()) else {
        return Ok(None);
    };
    match value.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(Error::Setting {
            setting: name,
            value,
            expected: ABOVE_ZERO.into(),
        }),
    }
}

fn above_zero(setting: &'static str, value: Option<u64>) -> Result<Option<u64>> {
    match value {
        Some(0) => Err(Error::Setting {
            setting,
            value: "0".into(),
            expected: ABOVE_ZERO.into(),
        }),
        other => Ok(other),
    }
}

fn check_precision(value: Option<String>) -> Result<()> {
    match value.as_deref().map(str::trim) {
        None | Some("" | "no") => Ok(()),
        Some(other) => Err(Error::Setting {
            setting: variable::ACCELERATE_MIXED_PRECISION,
            value: other.into(),
            expected: "this version trains in f32 only; set it to \"no\" or leave --mixed_precision out".into(),
        }),
    }
}

/// Returns the strategy that the environment asks for.
fn strategy(lookup: &impl Fn(&str) -> Option<String>) -> Result<Box<dyn ShardingStrategy>> {
    let refused = |setting, value: &str, expected: &str| Error::Setting {
        setting,
        value: value.into(),
        expected: expected.into(),
    };
    let used = lookup(variable::ACCELERATE_USE_DEEPSPEED).unwrap_or_default();
    match used.trim().to_ascii_lowercase().as_str() {
        "" | "false" | "0" | "no" | "off" => return Ok(Box::new(DataParallel)),
        "true" | "1" | "yes" | "on" => {}
        other => {
            return Err(refused(
                variable::ACCELERATE_USE_DEEPSPEED,
                other,
                "expected true or false",
            ));
        }
    }
    let setting = variable::ACCELERATE_DEEPSPEED_ZERO_STAGE;
    let stage = lookup(setting).unwrap_or_default();
    match stage.trim() {
        "0" => Ok(Box::new(DataParallel)),
        "1" => Ok(Box::new(ZeroStage::One)),
        "" | "2" => Ok(Box::new(ZeroStage::Two)),
        "3" => Err(refused(
            setting,
            "3",
            "stage 3 (sharded parameters) is not there yet in this version; use 0, 1 or 2",
        )),
        other => Err(refused(setting, other, "expected 0, 1 or 2")),
    }
}
