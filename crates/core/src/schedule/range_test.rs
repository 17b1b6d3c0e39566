//! The learning-rate range test: a rate that only grows, to find where training breaks.

use super::Schedule;

/// Grows the rate from `minimum`, by `step_rate` times the minimum every `step_size` steps, as DeepSpeed's
/// `LRRangeTest`; the optimizer's own rate is not used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrRangeTest {
    /// The first rate: `lr_range_test_min_lr`.
    pub minimum: f64,
    /// Optimizer steps of one unit of growth; 0 counts as 1: `lr_range_test_step_size`.
    pub step_size: u64,
    /// Growth per unit, as a share of the minimum: `lr_range_test_step_rate`.
    pub step_rate: f64,
    /// Grows in stairs of `step_size` steps: `lr_range_test_staircase`.
    pub staircase: bool,
}

impl Default for LrRangeTest {
    fn default() -> Self {
        Self {
            minimum: 1e-3,
            step_size: 2000,
            step_rate: 1.0,
            staircase: false,
        }
    }
}

impl Schedule for LrRangeTest {
    fn learning_rate(&self, _base: f64, step: u64) -> f64 {
        let units = step as f64 / self.step_size.max(1) as f64;
        let units = if self.staircase { units.floor() } else { units };
        self.minimum * (1.0 + self.step_rate * units)
    }
}
