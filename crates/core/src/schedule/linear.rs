//! Warm-up, then a straight line down to zero.

use super::Schedule;

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
        let (step, warmup, total) = (step as f64, self.warmup_steps as f64, self.total_steps as f64);
        let factor = if step < warmup {
            step / warmup.max(1.0)
        } else {
            ((total - step) / (total - warmup).max(1.0)).max(0.0)
        };
        base * factor
    }
}
