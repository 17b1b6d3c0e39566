//! DeepSpeed's warm-up schedules: `WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`.
//!
//! Their counter starts at -1, so step 1 counts as their step 0: **both of the first two optimizer steps run at the
//! minimum**. Kept, so that a run moved here from DeepSpeed sees the same rates. Source: `runtime/lr_schedules.py`.

use super::{Schedule, progress};
use std::f64::consts::PI;

/// The form of a warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum WarmupType {
    /// As the logarithm of the step: fast, then slow. It arrives one step before the line does.
    #[default]
    Log,
    /// A straight line.
    Linear,
}

/// Rises from `minimum` to `maximum` over `warmup_steps` and stays there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WarmupLr {
    /// The first rate: `warmup_min_lr`, 0 by default.
    pub minimum: f64,
    /// The last rate: `warmup_max_lr`, by default the optimizer's.
    pub maximum: Option<f64>,
    /// Optimizer steps of the rise, at least 2: `warmup_num_steps`.
    pub warmup_steps: u64,
    /// Its form: `warmup_type`.
    pub warmup_type: WarmupType,
}

impl Default for WarmupLr {
    fn default() -> Self {
        Self {
            minimum: 0.0,
            maximum: None,
            warmup_steps: 1000,
            warmup_type: WarmupType::default(),
        }
    }
}

impl WarmupLr {
    fn between(&self, base: f64, height: f64) -> f64 {
        self.minimum + (self.maximum.unwrap_or(base) - self.minimum) * height
    }
}

impl Schedule for WarmupLr {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        match Phase::of(step, self.warmup_steps, self.warmup_type) {
            Phase::Start => self.minimum,
            Phase::Warmup(height) => self.between(base, height),
            Phase::After(_) => self.between(base, 1.0),
        }
    }
}

/// As [`WarmupLr`], then falls linearly to the minimum at `total_steps`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WarmupDecayLr {
    /// The rise and the two rates.
    pub warmup: WarmupLr,
    /// Optimizer steps of the run: `total_num_steps`.
    pub total_steps: u64,
}

impl Schedule for WarmupDecayLr {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let WarmupLr {
            warmup_steps,
            warmup_type,
            ..
        } = self.warmup;
        match Phase::of(step, warmup_steps, warmup_type) {
            Phase::After(counted) => {
                let total = self.total_steps as f64;
                let remaining = (total - counted as f64) / (total - least_two(warmup_steps) as f64).max(1.0);
                self.warmup.between(base, remaining.max(0.0))
            }
            _ => self.warmup.learning_rate(base, step),
        }
    }
}

/// Rises to the optimizer's rate, then follows a cosine down to a share of it at `total_steps`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WarmupCosineLr {
    /// Optimizer steps of the run: `total_num_steps`.
    pub total_steps: u64,
    /// The share of the optimizer's rate at which the rise begins: `warmup_min_ratio`. Step 0 runs at 0 nevertheless.
    pub warmup_minimum: f64,
    /// Optimizer steps of the rise, at least 2: `warmup_num_steps`.
    pub warmup_steps: u64,
    /// The share of the optimizer's rate from `total_steps` on: `cos_min_ratio`.
    pub cosine_minimum: f64,
    /// The form of the rise: `warmup_type`.
    pub warmup_type: WarmupType,
}

impl WarmupCosineLr {
    /// Makes the schedule with DeepSpeed's defaults.
    pub fn new(total_steps: u64) -> Self {
        Self {
            total_steps,
            warmup_minimum: 0.0,
            warmup_steps: 1000,
            cosine_minimum: 1e-4,
            warmup_type: WarmupType::default(),
        }
    }
}

impl Schedule for WarmupCosineLr {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        base * match Phase::of(step, self.warmup_steps, self.warmup_type) {
            Phase::Start => 0.0,
            Phase::Warmup(height) => self.warmup_minimum + (1.0 - self.warmup_minimum) * height,
            Phase::After(counted) => {
                let progress = progress(
                    counted.saturating_add(1),
                    least_two(self.warmup_steps),
                    self.total_steps,
                );
                let height = (1.0 + (PI * progress.min(1.0)).cos()) / 2.0;
                (self.cosine_minimum + (1.0 - self.cosine_minimum) * height).max(0.0)
            }
        }
    }
}

enum Phase {
    /// Before the counter starts.
    Start,
    /// How far the rise has come, 0 to 1.
    Warmup(f64),
    /// After it, with the step as DeepSpeed counts it.
    After(u64),
}

impl Phase {
    fn of(step: u64, warmup_steps: u64, warmup_type: WarmupType) -> Self {
        let Some(counted) = step.checked_sub(1) else {
            return Self::Start;
        };
        let warmup_steps = least_two(warmup_steps);
        if counted >= warmup_steps {
            return Self::After(counted);
        }
        Self::Warmup(match warmup_type {
            WarmupType::Log => (step as f64).ln() / (warmup_steps as f64).ln(),
            WarmupType::Linear => counted as f64 / warmup_steps as f64,
        })
    }
}

/// A logarithmic rise over one step would divide by the logarithm of 1.
fn least_two(warmup_steps: u64) -> u64 {
    warmup_steps.max(2)
}
