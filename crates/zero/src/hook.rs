//! The hook through which a parameter's gradient is caught in the middle of the backward pass.
//!
//! A model gets `anchor.apply_op1(GradientHook)` for a parameter. candle calls [`GradientHook::bwd`] exactly once per
//! backward, when every consumer of the parameter has contributed: the gradient goes straight into its bucket, and
//! `None` keeps it out of candle's gradient store.

use crate::gradients::Gradients;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// The op that hands a parameter's data out and takes its gradient in.
pub(crate) struct GradientHook {
    number: usize,
    shape: Shape,
    /// The data, until the op has run.
    data: Mutex<Option<CpuStorage>>,
    gradients: Arc<Gradients>,
}

impl GradientHook {
    pub(crate) fn new(number: usize, data: Tensor, gradients: Arc<Gradients>) -> crate::Result<Self> {
        let shape = data.shape().clone();
        let storage = CpuStorage::F32(data.flatten_all()?.to_vec1::<f32>()?);
        Ok(Self {
            number,
            shape,
            data: Mutex::new(Some(storage)),
            gradients,
        })
    }
}

impl CustomOp1 for GradientHook {
    fn name(&self) -> &'static str {
        "managed-parameter"
    }

    fn cpu_fwd(&self, _anchor: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let data = self.data.lock().unwrap_or_else(PoisonError::into_inner).take();
        match data {
            Some(data) => Ok((data, self.shape.clone())),
            None => candle_core::bail!("a managed parameter is made once"),
        }
    }

    fn bwd(&self, _anchor: &Tensor, _parameter: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.gradients.accept(self.number, gradient)?;
        Ok(None)
    }
}
