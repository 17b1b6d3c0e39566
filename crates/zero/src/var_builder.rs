//! The `VarBuilder` backend: every parameter that a model creates comes from here.

use crate::gradients::Gradients;
use crate::parameters::Parameters;
use crate::weights::WeightSource;
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use std::sync::Arc;

/// Creates managed parameters from a source of weights.
pub(crate) struct ManagedBackend {
    pub(crate) parameters: Arc<Parameters>,
    pub(crate) gradients: Arc<Gradients>,
    pub(crate) source: WeightSource,
}

impl SimpleBackend for ManagedBackend {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let load = || self.source.load(name, &shape, init, dtype, device);
        Ok(self
            .parameters
            .register(name, &shape, dtype, device, &self.gradients, load)?)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let shape = self.source.shape_of(name)?;
        self.get(shape, name, Init::Const(0.0), dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.source.contains(name)
    }
}
