//! Half and whole waves: the cosine schedules of transformers and of torch.

use super::{Schedule, progress, rise};
use std::f64::consts::PI;

/// Rises linearly from 0 over `warmup_steps`, then follows a cosine down to 0 at `total_steps`, as transformers'
/// `get_cosine_schedule_with_warmup`; past the end the wave goes on.
#[derive(Debug, Clone, Copy)]
pub struct CosineSchedule {
    /// Optimizer steps of the rise.
    pub warmup_steps: u64,
    /// Optimizer steps of the run.
    pub total_steps: u64,
    /// Waves between the end of the rise and `total_steps`; transformers' default is 0.5, one fall.
    pub cycles: f64,
}

impl Schedule for CosineSchedule {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let factor = rise(step, self.warmup_steps)
            .unwrap_or_else(|| wave(self.cycles * progress(step, self.warmup_steps, self.total_steps)));
        base * factor
    }
}

/// As [`CosineSchedule`], but falls `cycles` times, each time from the full rate to 0, and stays at 0 from
/// `total_steps` on: transformers' `get_cosine_with_hard_restarts_schedule_with_warmup`.
#[derive(Debug, Clone, Copy)]
pub struct CosineWithRestartsSchedule {
    /// Optimizer steps of the rise.
    pub warmup_steps: u64,
    /// Optimizer steps of the run.
    pub total_steps: u64,
    /// Number of falls; transformers' default is 1.
    pub cycles: u64,
}

impl Schedule for CosineWithRestartsSchedule {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let factor = rise(step, self.warmup_steps).unwrap_or_else(|| {
            let progress = progress(step, self.warmup_steps, self.total_steps);
            if progress >= 1.0 {
                0.0
            } else {
                wave(0.5 * ((self.cycles as f64 * progress) % 1.0))
            }
        });
        base * factor
    }
}

/// The least learning rate of a schedule.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MinimumRate {
    /// A learning rate: `min_lr`.
    Absolute(f64),
    /// A share of the optimizer's rate: `min_lr_rate`.
    Relative(f64),
}

impl MinimumRate {
    fn share_of(self, base: f64) -> f64 {
        match self {
            Self::Relative(share) => share,
            // Any share of nothing is nothing; 0/0 must not reach the parameters.
            Self::Absolute(_) if base == 0.0 => 0.0,
            Self::Absolute(rate) => rate / base,
        }
    }
}

/// As [`CosineSchedule`], down to `minimum`: transformers' `get_cosine_with_min_lr_schedule_with_warmup`.
#[derive(Debug, Clone, Copy)]
pub struct CosineWithMinimumSchedule {
    /// Optimizer steps of the rise.
    pub warmup_steps: u64,
    /// Optimizer steps of the run.
    pub total_steps: u64,
    /// Waves after the rise; transformers' default is 0.5.
    pub cycles: f64,
    /// The rate at the bottom of the wave.
    pub minimum: MinimumRate,
}

impl Schedule for CosineWithMinimumSchedule {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let factor = rise(step, self.warmup_steps).unwrap_or_else(|| {
            let wave = wave(self.cycles * progress(step, self.warmup_steps, self.total_steps));
            raise(wave, self.minimum.share_of(base))
        });
        base * factor
    }
}

/// As [`CosineWithMinimumSchedule`], but the rise begins above 0 and the wave one step earlier: transformers'
/// `get_cosine_with_min_lr_schedule_with_warmup_lr_rate`.
#[derive(Debug, Clone, Copy)]
pub struct CosineWarmupWithMinimumSchedule {
    /// Optimizer steps of the rise.
    pub warmup_steps: u64,
    /// Optimizer steps of the run.
    pub total_steps: u64,
    /// Waves after the rise; transformers' default is 0.5.
    pub cycles: f64,
    /// The rate at the bottom of the wave.
    pub minimum: MinimumRate,
    /// The share of the optimizer's rate at step 0; `None` begins with one part in `warmup_steps`.
    pub warmup_rate: Option<f64>,
}

impl Schedule for CosineWarmupWithMinimumSchedule {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let (now, warmup, total) = (step as f64, self.warmup_steps as f64, self.total_steps as f64);
        let factor = if step < self.warmup_steps {
            match self.warmup_rate {
                None => (now + 1.0) / warmup.max(1.0),
                Some(first) => first + (1.0 - first) * now / (warmup - 1.0).max(1.0),
            }
        } else {
            let progress = (now - warmup + 1.0) / (total - warmup).max(1.0);
            raise(wave(self.cycles * progress), self.minimum.share_of(base))
        };
        base * factor
    }
}

/// Swings between the optimizer's rate and `minimum` with a half wave of `half_period` steps, as torch's
/// `CosineAnnealingLR`.
#[derive(Debug, Clone, Copy)]
pub struct CosineAnnealingLr {
    /// Optimizer steps from the highest rate to the lowest: torch's `T_max`.
    pub half_period: u64,
    /// The lowest rate: torch's `eta_min`.
    pub minimum: f64,
}

impl Schedule for CosineAnnealingLr {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        self.minimum + (base - self.minimum) * wave(0.5 * progress(step, 0, self.half_period))
    }
}

/// Returns a cosine wave between 1 (at 0) and 0 (at half a turn).
fn wave(turns: f64) -> f64 {
    (0.5 * (1.0 + (PI * 2.0 * turns).cos())).max(0.0)
}

fn raise(factor: f64, minimum: f64) -> f64 {
    (factor * (1.0 - minimum) + minimum).max(0.0)
}
