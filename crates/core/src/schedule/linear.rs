//! Straight lines: warm-up and decay to zero, and torch's change of factor.

use super::{Schedule, progress, rise};

/// Rises linearly from 0 over `warmup_steps`, then falls linearly to 0 at `total_steps`, as transformers'
/// `get_linear_schedule_with_warmup`.
#[derive(Debug, Clone, Copy)]
pub struct LinearSchedule {
    /// Optimizer steps of the rise.
    pub warmup_steps: u64,
    /// Optimizer steps of the run.
    pub total_steps: u64,
}

impl Schedule for LinearSchedule {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let (now, warmup, total) = (step as f64, self.warmup_steps as f64, self.total_steps as f64);
        let factor =
            rise(step, self.warmup_steps).unwrap_or_else(|| ((total - now) / (total - warmup).max(1.0)).max(0.0));
        base * factor
    }
}

/// Moves the factor on the optimizer's rate from `start_factor` to `end_factor` over `total_steps`, as torch's
/// `LinearLR`.
#[derive(Debug, Clone, Copy)]
pub struct LinearLr {
    /// The factor of step 0.
    pub start_factor: f64,
    /// The factor from `total_steps` on.
    pub end_factor: f64,
    /// Optimizer steps of the change.
    pub total_steps: u64,
}

impl Default for LinearLr {
    fn default() -> Self {
        Self {
            start_factor: 1.0 / 3.0,
            end_factor: 1.0,
            total_steps: 5,
        }
    }
}

impl Schedule for LinearLr {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let share = progress(step, 0, self.total_steps).min(1.0);
        base * (self.start_factor + (self.end_factor - self.start_factor) * share)
    }
}
