//! The sections `fp16` and `bf16`.

use super::Setting;
use super::error::ConfigError;
use super::json::Node;
use super::section::{AutoRule, Section};

/// Training in f16 with a scaled loss.
#[derive(Debug, Clone, PartialEq)]
pub struct Fp16 {
    /// Whether it is on.
    pub enabled: Setting<bool>,
    /// The factor on the loss; 0 lets it adapt.
    pub loss_scale: f64,
    /// The power of 2 at which an adapting factor begins.
    pub initial_scale_power: u64,
    /// Steps without overflow after which the factor doubles.
    pub loss_scale_window: u64,
    /// Overflows in a row before the factor halves.
    pub hysteresis: u64,
    /// Refills the hysteresis after every step without overflow.
    pub consecutive_hysteresis: bool,
    /// The least factor.
    pub min_loss_scale: f64,
}

/// Training in bf16.
#[derive(Debug, Clone, PartialEq)]
pub struct Bf16 {
    /// Whether it is on.
    pub enabled: Setting<bool>,
    /// Skips a step whose gradients are not finite.
    pub check_grad_overflow: bool,
}

const FULL_MASTER: &str = "master weights and states are f32 here; remove it";

impl Fp16 {
    pub(super) fn read(top: &mut Section<'_>) -> Result<Self, ConfigError> {
        let mut default = Self {
            enabled: Setting::Given(false),
            loss_scale: 0.0,
            initial_scale_power: 16,
            loss_scale_window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            min_loss_scale: 1.0,
        };
        let Some(mut section) = top.child("fp16", AutoRule::MeansDefault)? else {
            return Ok(default);
        };
        default.enabled = section.setting("enabled", false)?;
        default.loss_scale = section.value("loss_scale", default.loss_scale)?;
        section.check(
            default.loss_scale >= 0.0 && (default.loss_scale as f32).is_finite(),
            "loss_scale",
            "a number from 0 that f32 holds; 0 lets the scale adapt",
        )?;
        default.initial_scale_power = section.value("initial_scale_power", default.initial_scale_power)?;
        let power = default.initial_scale_power;
        section.check(
            power < 128,
            "initial_scale_power",
            "a power of 2 that f32 holds, below 128",
        )?;
        default.loss_scale_window = section.value("loss_scale_window", default.loss_scale_window)?;
        section.check(
            default.loss_scale_window > 0,
            "loss_scale_window",
            "a whole number above 0",
        )?;
        default.hysteresis = section.value("hysteresis", default.hysteresis)?;
        section.check(default.hysteresis > 0, "hysteresis", "a whole number above 0")?;
        default.consecutive_hysteresis = section.value("consecutive_hysteresis", false)?;
        default.min_loss_scale = section.value("min_loss_scale", default.min_loss_scale)?;
        let highest = 2f64.powi(power as i32);
        section.check(
            default.min_loss_scale > 0.0 && default.min_loss_scale <= highest,
            "min_loss_scale",
            "a number above 0, and not above 2 to the power \"initial_scale_power\"",
        )?;
        // The second is of no version of DeepSpeed, but in files that are passed around.
        section.no_effect(&["auto_cast", "auto_adjust_loss_scale"]);
        section.refuse("fp16_master_weights_and_grads", is_true, FULL_MASTER)?;
        section.finish()?;
        Ok(default)
    }
}

impl Bf16 {
    pub(super) fn read(top: &mut Section<'_>) -> Result<Self, ConfigError> {
        let mut default = Self {
            enabled: Setting::Given(false),
            check_grad_overflow: true,
        };
        let Some(mut section) = top.child("bf16", AutoRule::MeansDefault)? else {
            return Ok(default);
        };
        default.enabled = section.setting("enabled", false)?;
        default.check_grad_overflow = section.value("check_grad_overflow", true)?;
        section.no_effect(&["immediate_grad_update"]);
        section.refuse("bf16_master_weights_and_grads", is_true, FULL_MASTER)?;
        section.refuse("bf16_optimizer_states", is_true, FULL_MASTER)?;
        section.finish()?;
        Ok(default)
    }
}

/// Says whether a feature is turned on by `true`.
pub(super) fn is_true(node: &Node) -> bool {
    *node == Node::Flag(true)
}
