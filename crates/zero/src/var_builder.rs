//! The `VarBuilder` backend: every parameter that a model creates comes from here.

use crate::parameters::{Parameters, Receivers};
use crate::unit;
use crate::units::Units;
use crate::weights::{Initial, WeightSource};
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use std::sync::Arc;

/// Creates managed parameters from a source of weights.
pub(crate) struct ManagedBackend {
    pub(crate) parameters: Arc<Parameters>,
    pub(crate) receivers: Receivers,
    pub(crate) units: Arc<Units>,
    pub(crate) source: Arc<WeightSource>,
}

impl SimpleBackend for ManagedBackend {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let initial = Initial {
            source: Arc::clone(&self.source),
            init,
        };
        Ok(self
            .parameters
            .register(name, &shape, dtype, device, &self.receivers, initial)?)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        if name.contains(unit::QUESTION) {
            unit::answer(&self.units);
        }
        if name.contains('\u{0}') {
            candle_core::bail!("a question of a part of the model, not a parameter");
        }
        let shape = self.source.shape_of(name)?;
        self.get(shape, name, Init::Const(0.0), dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.source.contains(name)
    }
}
