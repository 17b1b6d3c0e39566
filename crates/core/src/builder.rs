//! Making an accelerator: settings from code, then from the environment, then defaults.

use crate::accumulation::Accumulation;
use crate::environment as variable;
use crate::managed::ManagedAccelerator;
use crate::{Accelerator, Error, Result};
use candle_core::Device;
use sconce_collectives::{Options, World, connect};
use sconce_zero::{DataParallel, Engine, EngineOptions, ShardingStrategy};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

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

    /// Sets where parameters, gradients and optimizer state live; [`DataParallel`] by default.
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
        let steps = match self.gradient_accumulation_steps {
            Some(steps) => steps,
            None => number(&lookup, variable::ACCELERATE_GRADIENT_ACCUMULATION_STEPS)?.unwrap_or(1),
        };
        if steps == 0 {
            return Err(Error::Setting {
                setting: "gradient_accumulation_steps",
                value: "0".into(),
                expected: "a whole number above 0".into(),
            });
        }
        check_precision(lookup(variable::ACCELERATE_MIXED_PRECISION))?;
        let seconds: Option<u64> = number(&lookup, variable::SCONCE_TIMEOUT)?;
        let timeout = self.timeout.or(seconds.map(Duration::from_secs));
        let folder = lookup(variable::SCONCE_FLIGHT_RECORDER).map_or_else(std::env::temp_dir, PathBuf::from);
        let options = Options {
            timeout: timeout.unwrap_or(Options::default().timeout),
            flight_recorder: Some(folder),
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
                strategy: self.strategy.unwrap_or_else(|| Box::new(DataParallel)),
                find_unused_parameters: self.find_unused_parameters,
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

fn number<T: FromStr>(lookup: &impl Fn(&str) -> Option<String>, name: &'static str) -> Result<Option<T>> {
    let Some(value) = lookup(name).filter(|value| !value.trim().is_empty()) else {
        return Ok(None);
    };
    match value.trim().parse() {
        Ok(number) => Ok(Some(number)),
        Err(_) => Err(Error::Setting {
            setting: name,
            value,
            expected: "a whole number".into(),
        }),
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
