//! Schedules that are a closure of the program's.

use super::Schedule;
use std::fmt;

/// Multiplies the optimizer's rate by what a closure makes of the optimizer step, as torch's `LambdaLR`.
///
/// The closure must be the same function on all ranks.
///
/// ```
/// use sconce_core::Schedule;
/// use sconce_core::schedule::LambdaSchedule;
///
/// let schedule = LambdaSchedule::new(|step| 1.0 / (1.0 + step as f64));
/// assert_eq!(schedule.learning_rate(0.5, 3), 0.125);
/// ```
#[derive(Clone)]
pub struct LambdaSchedule<F> {
    factor: F,
}

impl<F: Fn(u64) -> f64> LambdaSchedule<F> {
    /// Makes a schedule of the factor on the optimizer's rate at each optimizer step, from 0.
    pub fn new(factor: F) -> Self {
        Self { factor }
    }
}

impl<F: Fn(u64) -> f64> Schedule for LambdaSchedule<F> {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        base * (self.factor)(step)
    }
}

impl<F> fmt::Debug for LambdaSchedule<F> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("LambdaSchedule").finish_non_exhaustive()
    }
}
