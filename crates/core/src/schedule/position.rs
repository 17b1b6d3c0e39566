//! How far a schedule has come, shared with what saves it.

use crate::checkpoint::Stateful;
use crate::optimizer::LearningRate;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The step of a schedule, and the learning rate that it has set.
#[derive(Debug)]
pub(crate) struct SchedulePosition {
    steps: AtomicU64,
    learning_rate: Arc<LearningRate>,
}

#[derive(Serialize, Deserialize)]
struct Saved {
    steps: u64,
    learning_rate: f64,
}

impl SchedulePosition {
    pub(super) fn new(learning_rate: Arc<LearningRate>) -> Self {
        let steps = AtomicU64::new(0);
        Self { steps, learning_rate }
    }

    pub(super) fn steps(&self) -> u64 {
        self.steps.load(Relaxed)
    }

    pub(super) fn advance(&self, steps: u64) {
        self.steps.store(self.steps().saturating_add(steps), Relaxed);
    }

    pub(super) fn learning_rate(&self) -> &LearningRate {
        &self.learning_rate
    }
}

impl Stateful for SchedulePosition {
    fn state(&self) -> Result<Value, Box<dyn std::error::Error + Send + Sync>> {
        let learning_rate = self.learning_rate.get();
        let steps = self.steps();
        Ok(serde_json::to_value(Saved { steps, learning_rate })?)
    }

    fn restore(&self, state: Value) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let saved: Saved = serde_json::from_value(state)?;
        self.steps.store(saved.steps, Relaxed);
        self.learning_rate.set(saved.learning_rate);
        Ok(())
    }
}
