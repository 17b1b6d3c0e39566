//! Warm-up, a plateau, then a decay, each of a given length.

use super::Schedule;
use std::f64::consts::PI;

/// Rises over `warmup_steps`, keeps the optimizer's rate for `stable_steps`, falls over `decay_steps` and stays at the
/// minimum, as transformers' `get_wsd_schedule`.
#[derive(Debug, Clone, Copy)]
pub struct WarmupStableDecaySchedule {
    /// Optimizer steps of the rise.
    pub warmup_steps: u64,
    /// Optimizer steps at the full rate.
    pub stable_steps: u64,
    /// Optimizer steps of the fall.
    pub decay_steps: u64,
    /// How the rate rises; transformers' default is [`Curve::Linear`].
    pub warmup: Curve,
    /// How the rate falls; transformers' default is [`Curve::Cosine`].
    pub decay: Curve,
    /// The share of the optimizer's rate at either end; transformers' default is 0.
    pub minimum: f64,
    /// Waves of a cosine decay; transformers' default is 0.5, one fall.
    pub cycles: f64,
}

/// The form of a rise or a fall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Curve {
    /// A straight line.
    Linear,
    /// A cosine.
    Cosine,
    /// One minus a square root: `1-sqrt`.
    OneMinusSquareRoot,
}

impl Schedule for WarmupStableDecaySchedule {
    fn learning_rate(&self, base: f64, step: u64) -> f64 {
        let plateau_end = self.warmup_steps.saturating_add(self.stable_steps);
        let factor = if step < self.warmup_steps {
            let progress = step as f64 / self.warmup_steps as f64;
            match self.warmup {
                Curve::Linear => progress,
                Curve::Cosine => 0.5 * (1.0 - (PI * progress).cos()),
                Curve::OneMinusSquareRoot => 1.0 - (1.0 - progress).sqrt(),
            }
        } else if step < plateau_end {
            return base;
        } else if step - plateau_end < self.decay_steps {
            let progress = (step - plateau_end) as f64 / self.decay_steps as f64;
            match self.decay {
                Curve::Linear => 1.0 - progress,
                Curve::Cosine => 0.5 * (1.0 + (PI * self.cycles * 2.0 * progress).cos()),
                Curve::OneMinusSquareRoot => 1.0 - progress.sqrt(),
            }
        } else {
            return base * self.minimum;
        };
        base * (factor * (1.0 - self.minimum) + self.minimum).max(0.0)
    }
}
