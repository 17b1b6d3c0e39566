//! What keeps overflow out of the parameters: the loss scale, and steps that are skipped.

use crate::{EngineOptions, LossScaleState, LossScaler, Result};
use candle_core::{DType, Tensor};

/// What [`Engine::step`](crate::Engine::step) did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stepped {
    /// All parameters that hold a gradient were updated.
    Updated,
    /// Some rank's gradients overflowed: they were forgotten on all ranks, and nothing else changed.
    Skipped,
}

/// The loss scale of an engine and its count of skipped steps.
#[derive(Debug)]
pub(crate) struct LossGuard {
    scaler: Option<LossScaler>,
    skips: bool,
    skipped: u64,
}

impl LossGuard {
    pub(crate) fn new(options: &EngineOptions) -> Result<Self> {
        Ok(Self {
            scaler: options.loss_scaling.clone().map(LossScaler::new).transpose()?,
            skips: options.skip_nonfinite || options.loss_scaling.is_some(),
            skipped: 0,
        })
    }

    /// Says whether steps with gradients that are not finite are skipped.
    pub(crate) fn skips(&self) -> bool {
        self.skips
    }

    /// Returns the factor for losses, a number of f32: the gradients come from that one, however finer the setting is.
    pub(crate) fn scale(&self) -> f64 {
        self.scaler
            .as_ref()
            .map_or(1.0, |scaler| f64::from(scaler.scale() as f32))
    }

    pub(crate) fn skipped(&self) -> u64 {
        self.skipped
    }

    pub(crate) fn state(&self) -> Option<LossScaleState> {
        self.scaler.as_ref().map(LossScaler::state)
    }

    pub(crate) fn restore(&mut self, state: LossScaleState) -> Result<()> {
        self.scaler.as_mut().map_or(Ok(()), |scaler| scaler.restore(state))
    }

    /// Takes note of a step.
    pub(crate) fn note(&mut self, stepped: Stepped) -> Result<()> {
        let overflow = stepped == Stepped::Skipped;
        self.skipped += u64::from(overflow);
        self.scaler.as_mut().map_or(Ok(()), |scaler| scaler.update(overflow))
    }
}

/// Multiplies a loss, in f32 at least: what 16 bits hold of it must not overflow.
pub(crate) fn scaled(loss: &Tensor, scale: f64) -> Result<Tensor> {
    if scale == 1.0 {
        return Ok(loss.clone());
    }
    let loss = match loss.dtype() {
        DType::BF16 | DType::F16 => loss.to_dtype(DType::F32)?,
        _ => loss.clone(),
    };
    if scale == 0.0 {
        // candle takes a factor of 0 for the end of the graph, and parameters would get no gradient.
        return Ok((&loss * loss.zeros_like()?)?);
    }
    Ok((loss * scale)?)
}
