//! The one-cycle policy as DeepSpeed has it: `OneCycle`.

use super::Schedule;

/// Rises linearly from `minimum` to `maximum`, falls back, then decays below the minimum, while the first beta goes the
/// other way; the optimizer's own rate is not used.
///
/// torch's schedule of nearly the same name is [`OneCycleLr`](super::OneCycleLr). Source: DeepSpeed's
/// `runtime/lr_schedules.py`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OneCycle {
    /// The rate at both ends of the cycle: `cycle_min_lr`.
    pub minimum: f64,
    /// The rate between rise and fall: `cycle_max_lr`.
    pub maximum: f64,
    /// How fast the rate decays after the cycle: `decay_lr_rate`.
    pub decay_rate: f64,
    /// Optimizer steps of the rise: `cycle_first_step_size`.
    pub rising_steps: u64,
    /// Optimizer steps of the fall, by default as many as of the rise: `cycle_second_step_size`.
    pub falling_steps: Option<u64>,
    /// Stairs of the rise; 0 makes it smooth: `cycle_first_stair_count`.
    pub rising_stairs: u64,
    /// Stairs of the fall, by default as many as of the rise: `cycle_second_stair_count`.
    pub falling_stairs: Option<u64>,
    /// Optimizer steps of one unit of decay; 0 means no decay: `decay_step_size`.
    pub decay_steps: u64,
    /// The cycle of the first beta, or `None`: `cycle_momentum`.
    pub beta1: Option<Beta1Cycle>,
}

/// How [`OneCycle`] moves the first beta.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Beta1Cycle {
    /// The beta at the highest rate: `cycle_min_mom`.
    pub minimum: f64,
    /// The beta at the lowest rate: `cycle_max_mom`.
    pub maximum: f64,
    /// How fast the beta grows after the cycle: `decay_mom_rate`.
    pub decay_rate: f64,
}

impl Default for Beta1Cycle {
    fn default() -> Self {
        Self {
            minimum: 0.8,
            maximum: 0.9,
            decay_rate: 0.0,
        }
    }
}

impl OneCycle {
    /// Makes the cycle with DeepSpeed's defaults.
    pub fn new(minimum: f64, maximum: f64) -> Self {
        Self {
            minimum,
            maximum,
            decay_rate: 0.0,
            rising_steps: 2000,
            falling_steps: None,
            rising_stairs: 0,
            falling_stairs: None,
            decay_steps: 0,
            beta1: Some(Beta1Cycle::default()),
        }
    }

    /// Returns the first beta of optimizer step `step`, from 0; `None` leaves the optimizer's.
    ///
    /// Step 0 has the minimum, where the cycle itself would begin at the maximum: so DeepSpeed does it.
    pub fn beta1(&self, step: u64) -> Option<f64> {
        let beta1 = self.beta1?;
        Some(match self.place(step) {
            _ if step == 0 => beta1.minimum,
            Place::Cycle(height) => beta1.maximum - (beta1.maximum - beta1.minimum) * height,
            Place::Decay(units) => beta1.maximum * (1.0 + beta1.decay_rate * units),
        })
    }

    fn place(&self, step: u64) -> Place {
        let rising = self.rising_steps;
        let falling = self.falling_steps.unwrap_or(rising);
        let total = rising.saturating_add(falling);
        let (position, length, stairs) = if step < rising {
            (step, rising, self.rising_stairs)
        } else if step < total {
            let stairs = self.falling_stairs.unwrap_or(self.rising_stairs);
            (total - step, falling, stairs)
        } else if self.decay_steps == 0 {
            return Place::Decay(0.0);
        } else {
            return Place::Decay((step - total) as f64 / self.decay_steps as f64);
        };
        let (position, length, stairs) = (position as f64, length as f64, stairs as f64);
        Place::Cycle(if stairs > 0.0 {
            (position * stairs / length).floor() / stairs
        } else {
            position / length
        })
    }
}

impl Schedule for OneCycle {
    fn learning_rate(&self, _base: f64, step: u64) -> f64 {
        match self.place(step) {
            Place::Cycle(height) => self.minimum + (self.maximum - self.minimum) * height,
            Place::Decay(units) => self.minimum / (1.0 + self.decay_rate * units),
        }
    }
}

enum Place {
    /// How high in the cycle, 0 to 1.
    Cycle(f64),
    /// Units of decay since its end.
    Decay(f64),
}
