//! Loss scaling: gradients of f16 vanish unless the loss is multiplied before the backward, by as much as they bear.
//!
//! These are state machines only. [`Engine::backward`](crate::Engine::backward) multiplies the loss by
//! [`LossScaler::scale`]; the gradients are divided by that same number where they are used.
//! [`Engine::step`](crate::Engine::step) tells all ranks whether any rank's gradients overflowed, skips the step if so,
//! and calls [`LossScaler::update`] last: the scale may have changed then, and the gradients held belong to the old one.

use crate::optimizer::in_range;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// How the loss scale changes.
#[derive(Debug, Clone, PartialEq)]
pub enum LossScaling {
    /// This scale for ever; steps that overflow are still skipped.
    Static(f64),
    /// DeepSpeed's rule.
    Hysteresis(HysteresisScaling),
    /// The rule of PyTorch's `GradScaler`.
    Backoff(BackoffScaling),
}

/// DeepSpeed's dynamic loss scale (`DynamicLossScaler`): halved at overflow once its patience is used up, doubled after
/// a window of steps without.
///
/// The first doubling comes with step `window + 1` after the start or after an overflow, further ones every `window`
/// steps.
#[derive(Debug, Clone, PartialEq)]
pub struct HysteresisScaling {
    /// Scale at the start; DeepSpeed's `initial_scale_power` is its binary logarithm.
    pub initial_scale: f64,
    /// Steps without overflow between doublings.
    pub window: u64,
    /// The overflow, counted from 1, at which the scale is lowered; from then on every one lowers it, until the count
    /// is refilled when the scale doubles.
    pub hysteresis: u32,
    /// Refills the count at every step without overflow.
    pub consecutive_hysteresis: bool,
    /// The scale is never lowered below this.
    pub minimum: f64,
    /// Makes an overflow that would lower the scale an error when it is at the minimum already.
    pub fail_at_minimum: bool,
}

impl Default for HysteresisScaling {
    /// The defaults of DeepSpeed's configuration.
    fn default() -> Self {
        Self {
            initial_scale: 65536.0,
            window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            minimum: 1.0,
            fail_at_minimum: true,
        }
    }
}

/// The loss scale of PyTorch's `GradScaler`: lowered at every overflow, raised after a number of steps without.
///
/// Scales are rounded to f32, as there. There is no minimum but that of f32 numbers with an inverse: a model that is not
/// finite at any scale is never stepped.
#[derive(Debug, Clone, PartialEq)]
pub struct BackoffScaling {
    /// Scale at the start.
    pub initial_scale: f64,
    /// Factor at growth.
    pub growth_factor: f64,
    /// Factor at overflow.
    pub backoff_factor: f64,
    /// Steps without overflow before growth.
    pub growth_interval: u64,
}

impl Default for BackoffScaling {
    /// PyTorch's defaults.
    fn default() -> Self {
        Self {
            initial_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
        }
    }
}

/// What a [`LossScaler`] remembers: with its [`LossScaling`], all that a checkpoint needs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScaleState {
    /// The scale now.
    pub scale: f64,
    /// Updates so far.
    pub updates: u64,
    /// The number, from 0, of the last update with an overflow.
    pub last_overflow: Option<u64>,
    /// Updates without overflow since the last overflow or growth (PyTorch's growth tracker).
    pub since_change: u64,
    /// The overflow, counted from now, that will lower the scale (DeepSpeed's `cur_hysteresis`).
    pub hysteresis: u32,
}

/// The loss scale of one training run.
#[derive(Debug, Clone, PartialEq)]
pub struct LossScaler {
    scaling: LossScaling,
    state: LossScaleState,
}

impl LossScaler {
    /// Makes a scaler at its initial scale.
    ///
    /// # Errors
    /// [`Error::Setting`].
    pub fn new(scaling: LossScaling) -> Result<Self> {
        scaling.check()?;
        let (scale, hysteresis) = match &scaling {
            LossScaling::Static(scale) => (*scale, 1),
            LossScaling::Hysteresis(rule) => (rule.initial_scale, rule.hysteresis),
            LossScaling::Backoff(rule) => (rounded(rule.initial_scale), 1),
        };
        let state = LossScaleState {
            scale,
            updates: 0,
            last_overflow: None,
            since_change: 0,
            hysteresis,
        };
        Ok(Self { scaling, state })
    }

    /// Returns the factor for the loss.
    pub fn scale(&self) -> f64 {
        self.state.scale
    }

    /// Returns what a checkpoint keeps.
    pub fn state(&self) -> LossScaleState {
        self.state
    }

    /// Goes on from a checkpoint; settings stay those of this scaler.
    ///
    /// # Errors
    /// [`Error::Setting`] for a scale that no run can have.
    pub fn restore(&mut self, state: LossScaleState) -> Result<()> {
        check_scale("loss scale of the checkpoint", state.scale)?;
        self.state = state;
        Ok(())
    }

    /// Takes note of a step: whether the gradients of any rank overflowed. All ranks must pass the same.
    ///
    /// # Errors
    /// [`Error::LossScaleAtMinimum`]; the state is then as before.
    pub fn update(&mut self, overflow: bool) -> Result<()> {
        let state = &mut self.state;
        match (&self.scaling, overflow) {
            (LossScaling::Static(_), _) => {}
            (LossScaling::Hysteresis(rule), true) => rule.lower(state)?,
            (LossScaling::Hysteresis(rule), false) => rule.note_success(state),
            (LossScaling::Backoff(rule), true) => {
                let lowered = rounded(state.scale * rule.backoff_factor);
                // Gradients of a scale of 0 would all be finite.
                state.scale = if has_inverse(lowered) { lowered } else { state.scale };
            }
            (LossScaling::Backoff(rule), false) if state.since_change + 1 >= rule.growth_interval => {
                grow(state, rounded(state.scale * rule.growth_factor));
            }
            (LossScaling::Backoff(_), false) => state.since_change += 1,
        }
        if overflow {
            state.last_overflow = Some(state.updates);
            state.since_change = 0;
        }
        state.updates += 1;
        Ok(())
    }
}

impl HysteresisScaling {
    fn lower(&self, state: &mut LossScaleState) -> Result<()> {
        if self.hysteresis > 1 && state.hysteresis > 1 {
            state.hysteresis -= 1;
        } else if state.scale <= self.minimum && self.fail_at_minimum {
            return Err(Error::LossScaleAtMinimum { minimum: self.minimum });
        } else {
            state.scale = (state.scale / 2.0).max(self.minimum);
        }
        Ok(())
    }

    fn note_success(&self, state: &mut LossScaleState) {
        // The start counts like an overflow just before the first update.
        let stable = state
            .last_overflow
            .map_or(state.updates, |last| state.updates.saturating_sub(last + 1));
        let grows = stable > 0 && stable.is_multiple_of(self.window);
        if grows || self.consecutive_hysteresis {
            state.hysteresis = self.hysteresis;
        }
        if grows {
            grow(state, state.scale * 2.0);
        } else {
            state.since_change += 1;
        }
    }
}

/// Takes a larger scale, unless f32 cannot hold it: such a loss would not be finite.
fn grow(state: &mut LossScaleState, scale: f64) {
    if (scale as f32).is_finite() {
        state.scale = scale;
    }
    state.since_change = 0;
}

fn rounded(scale: f64) -> f64 {
    f64::from(scale as f32)
}

impl LossScaling {
    fn check(&self) -> Result<()> {
        match self {
            Self::Static(scale) => check_scale("loss_scale", *scale),
            Self::Hysteresis(rule) => rule.check(),
            Self::Backoff(rule) => rule.check(),
        }
    }
}

impl HysteresisScaling {
    fn check(&self) -> Result<()> {
        check_scale("minimum loss scale", self.minimum)?;
        check_scale("initial loss scale", self.initial_scale)?;
        let (initial, window) = (self.initial_scale, self.window);
        let expected = "at least the minimum loss scale";
        in_range("initial loss scale", initial, expected, initial >= self.minimum)?;
        in_range("loss scale window", window as f64, "1 or more", window > 0)?;
        in_range("hysteresis", self.hysteresis.into(), "1 or more", self.hysteresis > 0)
    }
}

impl BackoffScaling {
    fn check(&self) -> Result<()> {
        check_scale("initial loss scale", self.initial_scale)?;
        let (growth, backoff, interval) = (self.growth_factor, self.backoff_factor, self.growth_interval);
        let grows = growth > 1.0 && growth.is_finite();
        in_range("growth_factor", growth, "a finite number above 1", grows)?;
        let backs_off = backoff > 0.0 && backoff < 1.0;
        in_range("backoff_factor", backoff, "above 0 and below 1", backs_off)?;
        in_range("growth_interval", interval as f64, "1 or more", interval > 0)
    }
}

fn check_scale(setting: &'static str, scale: f64) -> Result<()> {
    let expected = "above 0 and finite as f32, its inverse too";
    in_range(setting, scale, expected, scale > 0.0 && has_inverse(scale))
}

/// Says whether a scale and its inverse are finite as f32, and not 0.
fn has_inverse(scale: f64) -> bool {
    (scale as f32).is_normal() && (scale.recip() as f32).is_finite()
}
