//! The optimizer as the loop sees it: it steps when an accumulation window ends.

use crate::Result;
use crate::accumulation::Accumulation;
use crate::clipping::StepClipping;
use crate::schedule::ScheduleStepping;
use sconce_zero::{Engine, Stepped};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// A prepared optimizer.
#[derive(Debug)]
pub struct Optimizer {
    engine: Arc<Engine>,
    accumulation: Arc<Accumulation>,
    clipping: Arc<StepClipping>,
    stepping: ScheduleStepping,
    learning_rate: Arc<LearningRate>,
    step_was_skipped: Arc<AtomicBool>,
}

/// A learning rate that optimizer and scheduler share.
#[derive(Debug)]
pub(crate) struct LearningRate {
    base: f64,
    current: AtomicU64,
}

impl LearningRate {
    pub(crate) fn base(&self) -> f64 {
        self.base
    }

    pub(crate) fn get(&self) -> f64 {
        f64::from_bits(self.current.load(Relaxed))
    }

    pub(crate) fn set(&self, value: f64) {
        self.current.store(value.to_bits(), Relaxed);
    }
}

impl Optimizer {
    pub(crate) fn new(
        engine: Arc<Engine>,
        accumulation: Arc<Accumulation>,
        clipping: Arc<StepClipping>,
        stepping: ScheduleStepping,
        base: f64,
    ) -> Self {
        let learning_rate = Arc::new(LearningRate {
            base,
            current: AtomicU64::new(base.to_bits()),
        });
        Self {
            engine,
            accumulation,
            clipping,
            stepping,
            learning_rate,
            step_was_skipped: Arc::default(),
        }
    }

    /// Updates the parameters; does nothing inside an accumulation window.
    ///
    /// Where clipping is set for the run ([`Clipping`](crate::Clipping)) and the program has not clipped itself, it clips
    /// first. With loss scaling a step is skipped on all ranks when a gradient of any rank overflowed, and the gradients
    /// are forgotten; see [`Optimizer::step_was_skipped`].
    ///
    /// # Errors
    /// When there are no gradients (no backward since the last `zero_grad`), or the last backward failed.
    pub fn step(&mut self) -> Result<()> {
        if self.accumulation.synchronises() {
            if let Some(max_norm) = self.clipping.take_due() {
                self.engine.clip_grad_norm(max_norm)?;
            }
            let stepped = self.engine.step(self.learning_rate.get())?;
            self.step_was_skipped.store(stepped == Stepped::Skipped, Relaxed);
        }
        Ok(())
    }

    /// Forgets the gradients; does nothing inside an accumulation window.
    ///
    /// # Errors
    /// None in this version.
    pub fn zero_grad(&mut self) -> Result<()> {
        if self.accumulation.synchronises() {
            self.engine.zero_grad();
            self.clipping.reset();
        }
        Ok(())
    }

    /// Says whether the last step was skipped because a gradient of some rank was not finite. The scheduler does not
    /// advance after such a step.
    pub fn step_was_skipped(&self) -> bool {
        self.step_was_skipped.load(Relaxed)
    }

    /// Returns the factor for losses, which changes only after a step; 1 without loss scaling.
    pub fn loss_scale(&self) -> f64 {
        self.engine.loss_scale()
    }

    /// Returns how many steps were skipped so far.
    pub fn skipped_steps(&self) -> u64 {
        self.engine.skipped_steps()
    }

    /// Returns the learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate.get()
    }

    /// Sets the learning rate of the next step; a scheduler overwrites it when it steps.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.learning_rate.set(learning_rate);
    }

    pub(crate) fn schedule_stepping(&self) -> ScheduleStepping {
        self.stepping
    }

    pub(crate) fn world_size(&self) -> usize {
        self.engine.communicator().size()
    }

    pub(crate) fn shared_learning_rate(&self) -> Arc<LearningRate> {
        Arc::clone(&self.learning_rate)
    }

    pub(crate) fn shared_skip(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.step_was_skipped)
    }

    pub(crate) fn shared_accumulation(&self) -> Arc<Accumulation> {
        Arc::clone(&self.accumulation)
    }
}
