//! Warm-up, then one over the square root of the step.

use super::{Schedule, rise};

/// Rises linearly from 0 over `warmup_steps`, then falls as `1 / sqrt(step)`, as transformers'
/// `get_inverse_sqrt_schedule`.
#[derive(Debug, Clone, Copy)]
pub struct InverseSquareRootSchedule {
    /// Optimizer steps of the rise.
    pub warmup_steps: u64,
    /// Steps over which the rate falls by the square root of 2 for the first time; by default `warmup_steps`, or 10000
    /// where that is 0.
    pub timescale: Option<u64>,
}

impl Schedule for InverseSquareRootSchedule {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let timescale = match (self.timescale, self.warmup_steps) {
            (Some(timescale), _) => timescale.max(1),
            (None, 0) => 10_000,
            (None, warmup) => warmup,
        } as f64;
        let factor = rise(step, self.warmup_steps).unwrap_or_else(|| {
            let since = step as f64 - self.warmup_steps as f64;
            ((since + timescale) / timescale).sqrt().recip()
        });
        base * factor
    }
}
