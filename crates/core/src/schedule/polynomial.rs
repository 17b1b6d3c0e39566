//! Warm-up, then a power of what remains of the run.

use super::{Schedule, rise};

/// Rises linearly from 0 over `warmup_steps`, then falls to `end` as the remaining share of the run to the power
/// `power`, as transformers' `get_polynomial_decay_schedule_with_warmup`.
#[derive(Debug, Clone, Copy)]
pub struct PolynomialSchedule {
    /// Optimizer steps of the rise.
    pub warmup_steps: u64,
    /// Optimizer steps of the run.
    pub total_steps: u64,
    /// The exponent; transformers' default is 1.
    pub power: f64,
    /// The learning rate from `total_steps` on; transformers' default is 1e-7.
    pub end: f64,
}

impl Schedule for PolynomialSchedule {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        match rise(step, self.warmup_steps) {
            Some(factor) => base * factor,
            None if step >= self.total_steps => self.end,
            None => {
                let (now, warmup, total) = (step as f64, self.warmup_steps as f64, self.total_steps as f64);
                let remaining = 1.0 - (now - warmup) / (total - warmup);
                (base - self.end) * remaining.powf(self.power) + self.end
            }
        }
    }
}
