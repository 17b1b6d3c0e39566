//! Learning rates over the run.
//!
//! A schedule counts optimizer steps: one per accumulation window, whatever the number of ranks. (Accelerate's scheduler
//! advances once per rank in every step unless batches are split; a schedule moved here from there needs its step
//! counts divided by the number of ranks.)

mod constant;
mod linear;

pub use constant::ConstantSchedule;
pub use linear::LinearSchedule;

use crate::Optimizer;
use crate::accumulation::Accumulation;
use crate::optimizer::LearningRate;
use std::sync::Arc;

/// A learning rate as a function of the optimizer step.
pub trait Schedule: std::fmt::Debug {
    /// Returns the learning rate of optimizer step `step`, from 0, given the optimizer's own rate.
    fn learning_rate(&self, base: f64, step: u64) -> f64;
}

/// A schedule bound to an optimizer.
#[derive(Debug)]
pub struct Scheduler<S> {
    schedule: S,
    steps: u64,
    learning_rate: Arc<LearningRate>,
    accumulation: Arc<Accumulation>,
}

impl<S: Schedule> Scheduler<S> {
    /// Binds a schedule to an optimizer and sets the rate of step 0.
    pub fn new(schedule: S, optimizer: &Optimizer) -> Self {
        let scheduler = Self {
            schedule,
            steps: 0,
            learning_rate: optimizer.shared_learning_rate(),
            accumulation: optimizer.shared_accumulation(),
        };
        scheduler.apply();
        scheduler
    }

    /// Goes on to the next optimizer step; does nothing inside an accumulation window.
    ///
    /// # Errors
    /// None in this version.
    pub fn step(&mut self) -> crate::Result<()> {
        if self.accumulation.synchronises() {
            self.steps += 1;
            self.apply();
        }
        Ok(())
    }

    /// Returns the learning rate of the next optimizer step.
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate.get()
    }

    fn apply(&self) {
        self.learning_rate
            .set(self.schedule.learning_rate(self.learning_rate.base(), self.steps));
    }
}
