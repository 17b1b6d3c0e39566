//! No schedule.

use super::Schedule;

/// Keeps the optimizer's own learning rate.
#[derive(Debug, Clone, Copy, Default)]
pub struct ConstantSchedule;

impl Schedule for ConstantSchedule {
    fn learning_rate(&self, base: f64, _step: u64) -> f64 {
        base
    }
}
