//! The one-cycle policy as torch has it: `OneCycleLR`.

use super::Schedule;
use std::f64::consts::PI;

/// Rises from `maximum / initial_division` to `maximum`, then falls to the initial rate over `final_division`, while
/// the first beta goes the other way. Past `total_steps` the last values hold (torch refuses to go on).
///
/// DeepSpeed's schedule of nearly the same name is [`OneCycle`](super::OneCycle). Source: torch's `OneCycleLR` with two
/// phases and cosine annealing, its defaults.
#[derive(Debug, Clone, Copy)]
pub struct OneCycleLr {
    /// The highest learning rate; the optimizer's own is not used.
    pub maximum: f64,
    /// Optimizer steps of the run.
    pub total_steps: u64,
    /// The share of the run in which the rate rises: torch's `pct_start`, 0.3 by default there.
    pub rising_share: f64,
    /// The highest rate over the first: torch's `div_factor`, 25 by default there.
    pub initial_division: f64,
    /// The first rate over the last: torch's `final_div_factor`, 1e4 by default there.
    pub final_division: f64,
    /// The least and the greatest first beta; `None` leaves the optimizer's. torch's default is (0.85, 0.95).
    pub beta1: Option<(f64, f64)>,
}

impl OneCycleLr {
    /// Makes the cycle with torch's defaults.
    pub fn new(maximum: f64, total_steps: u64) -> Self {
        Self {
            maximum,
            total_steps,
            rising_share: 0.3,
            initial_division: 25.0,
            final_division: 1e4,
            beta1: Some((0.85, 0.95)),
        }
    }

    /// Returns the first beta (Adam's) or the momentum (SGD's) of optimizer step `step`, from 0; `None` leaves the
    /// optimizer's.
    pub fn beta1(&self, step: u64) -> Option<f64> {
        let (least, greatest) = self.beta1?;
        Some(self.through(step, greatest, least, greatest))
    }

    fn through(&self, step: u64, first: f64, middle: f64, last: f64) -> f64 {
        let end = self.total_steps.saturating_sub(1) as f64;
        let now = (step as f64).min(end);
        let peak = self.rising_share * self.total_steps as f64 - 1.0;
        if now <= peak {
            anneal(first, middle, if peak > 0.0 { now / peak } else { 1.0 })
        } else if end > peak {
            anneal(middle, last, (now - peak) / (end - peak))
        } else {
            last
        }
    }
}

impl Schedule for OneCycleLr {
    fn learning_rate(&self, _base: f64, step: u64) -> f64 {
        let first = self.maximum / self.initial_division;
        self.through(step, first, self.maximum, first / self.final_division)
    }
}

fn anneal(from: f64, to: f64, share: f64) -> f64 {
    to + (from - to) / 2.0 * (1.0 + (PI * share).cos())
}
