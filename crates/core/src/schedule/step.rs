//! Rates that are multiplied by a factor now and then, as torch's `StepLR`, `MultiStepLR` and `ExponentialLR`.

use super::Schedule;

/// Multiplies the rate by `factor` every `step_size` steps: torch's `StepLR`.
#[derive(Debug, Clone, Copy)]
pub struct StepLr {
    /// Optimizer steps between two changes; 0 counts as 1.
    pub step_size: u64,
    /// What the rate is multiplied by: torch's `gamma`, 0.1 by default there.
    pub factor: f64,
}

impl Schedule for StepLr {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        base * power(self.factor, step / self.step_size.max(1))
    }
}

/// Multiplies the rate by `factor` at every milestone: torch's `MultiStepLR`.
#[derive(Debug, Clone)]
pub struct MultiStepLr {
    /// The steps from which a further factor is in force, in any order; one given twice counts twice.
    pub milestones: Vec<u64>,
    /// What the rate is multiplied by: torch's `gamma`, 0.1 by default there.
    pub factor: f64,
}

impl Schedule for MultiStepLr {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let passed = self.milestones.iter().filter(|milestone| **milestone <= step).count();
        base * power(self.factor, passed as u64)
    }
}

/// Multiplies the rate by `factor` every step: torch's `ExponentialLR`.
#[derive(Debug, Clone, Copy)]
pub struct ExponentialLr {
    /// What the rate is multiplied by: torch's `gamma`.
    pub factor: f64,
}

impl Schedule for ExponentialLr {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        base * power(self.factor, step)
    }
}

fn power(factor: f64, times: u64) -> f64 {
    // The whole powers of `powi` keep the sign of a negative factor; beyond its range only 0, 1 and infinity remain.
    factor.powi(i32::try_from(times).unwrap_or(i32::MAX))
}
