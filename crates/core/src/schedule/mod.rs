//! Learning rates over the run.
//!
//! A schedule counts optimizer steps: one per accumulation window, whatever the number of ranks. Accelerate's scheduler
//! advances once per rank in every step unless batches are split. A schedule moved here from there needs its step counts
//! divided by the number of ranks, or [`ScheduleAdvance::WorldSize`], which counts as Accelerate does.
//!
//! | from | schedules |
//! | --- | --- |
//! | transformers | [`ConstantSchedule`], [`ConstantWithWarmup`], [`LinearSchedule`], [`CosineSchedule`], [`CosineWithRestartsSchedule`], [`CosineWithMinimumSchedule`], [`CosineWarmupWithMinimumSchedule`], [`PolynomialSchedule`], [`InverseSquareRootSchedule`], [`WarmupStableDecaySchedule`] |
//! | DeepSpeed | [`WarmupLr`], [`WarmupDecayLr`], [`WarmupCosineLr`], [`OneCycle`], [`LrRangeTest`] |
//! | your own | [`LambdaSchedule`], a closure; or a type that implements [`Schedule`] |
//! | torch | [`StepLr`], [`MultiStepLr`], [`ExponentialLr`], [`LinearLr`], [`CosineAnnealingLr`], [`OneCycleLr`] |

mod constant;
mod cosine;
mod inverse_square_root;
mod lambda;
mod linear;
mod one_cycle;
mod one_cycle_lr;
mod polynomial;
mod position;
mod range_test;
mod step;
mod stepping;
mod warmup;
mod warmup_stable_decay;

pub use constant::{ConstantSchedule, ConstantWithWarmup};
pub use cosine::{
    CosineAnnealingLr, CosineSchedule, CosineWarmupWithMinimumSchedule, CosineWithMinimumSchedule,
    CosineWithRestartsSchedule, MinimumRate,
};
pub use inverse_square_root::InverseSquareRootSchedule;
pub use lambda::LambdaSchedule;
pub use linear::{LinearLr, LinearSchedule};
pub use one_cycle::{Beta1Cycle, OneCycle};
pub use one_cycle_lr::OneCycleLr;
pub use polynomial::PolynomialSchedule;
pub use range_test::LrRangeTest;
pub use step::{ExponentialLr, MultiStepLr, StepLr};
pub use stepping::{ScheduleAdvance, ScheduleStepping};
pub use warmup::{WarmupCosineLr, WarmupDecayLr, WarmupLr, WarmupType};
pub use warmup_stable_decay::{Curve, WarmupStableDecaySchedule};

use crate::Optimizer;
use crate::accumulation::Accumulation;
use position::SchedulePosition;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A learning rate as a function of the optimizer step.
pub trait Schedule: std::fmt::Debug {
    /// Returns the learning rate of optimizer step `step`, from 0, given the optimizer's own rate.
    fn learning_rate(&self, base: f64, step: u64) -> f64;
}

impl<S: Schedule + ?Sized> Schedule for Box<S> {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        (**self).learning_rate(base, step)
    }
}

/// A schedule bound to an optimizer.
#[derive(Debug)]
pub struct Scheduler<S> {
    schedule: S,
    position: Arc<SchedulePosition>,
    stepping: ScheduleStepping,
    world_size: usize,
    accumulation: Arc<Accumulation>,
    step_was_skipped: Arc<AtomicBool>,
}

impl<S: Schedule> Scheduler<S> {
    /// Binds a schedule to an optimizer and sets the rate of step 0.
    pub fn new(schedule: S, optimizer: &Optimizer) -> Self {
        let scheduler = Self {
            schedule,
            position: Arc::new(SchedulePosition::new(optimizer.shared_learning_rate())),
            stepping: optimizer.schedule_stepping(),
            world_size: optimizer.world_size(),
            accumulation: optimizer.shared_accumulation(),
            step_was_skipped: optimizer.shared_skip(),
        };
        scheduler.apply();
        scheduler
    }

    /// Goes on to the next optimizer step; does nothing inside an accumulation window, and after a step that was skipped
    /// because gradients overflowed. [`ScheduleStepping`] may say otherwise.
    ///
    /// # Errors
    /// None in this version.
    pub fn step(&mut self) -> crate::Result<()> {
        let has_stepped = self.accumulation.synchronises() && !self.step_was_skipped.load(Relaxed);
        let steps = self.stepping.steps(has_stepped, self.world_size);
        if steps > 0 {
            self.position.advance(steps);
            self.apply();
        }
        Ok(())
    }

    /// Returns how far the schedule has come: the step whose learning rate is in force, from 0.
    pub fn steps(&self) -> u64 {
        self.position.steps()
    }

    /// Returns the learning rate of the next optimizer step.
    pub fn learning_rate(&self) -> f64 {
        self.position.learning_rate().get()
    }

    /// Returns how far it has come, for checkpoints.
    pub(crate) fn position(&self) -> Arc<SchedulePosition> {
        Arc::clone(&self.position)
    }

    fn apply(&self) {
        let rate = self.position.learning_rate();
        rate.set(self.schedule.learning_rate(rate.base(), self.position.steps()));
    }
}

/// Returns the height of a linear rise from 0 to 1 over `warmup_steps`, or `None` once it is over.
fn rise(step: u64, warmup_steps: u64) -> Option<f64> {
    (step < warmup_steps).then(|| step as f64 / warmup_steps as f64)
}

/// Returns how far `step` lies between the end of the warm-up (0) and the end of the run (1).
fn progress(step: u64, warmup_steps: u64, total_steps: u64) -> f64 {
    let (step, warmup, total) = (step as f64, warmup_steps as f64, total_steps as f64);
    (step - warmup) / (total - warmup).max(1.0)
}
