//! No schedule, and none after a warm-up.

use super::{Schedule, rise};

/// Keeps the optimizer's own learning rate.
#[derive(Debug, Clone, Copy, Default)]
pub struct ConstantSchedule;

impl Schedule for ConstantSchedule {
    fn learning_rate(&self, base: f64, _step: u64) -> f64 {
        base
    }
}

/// Rises linearly from 0 over `warmup_steps`, then keeps the optimizer's own rate, as transformers'
/// `get_constant_schedule_with_warmup`.
#[derive(Debug, Clone, Copy)]
pub struct ConstantWithWarmup {
    /// Optimizer steps of the rise.
    pub warmup_steps: u64,
}

impl Schedule for ConstantWithWarmup {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        base * rise(step, self.warmup_steps).unwrap_or(1.0)
    }
}
