//! The hook through which a parameter's gradient is caught in the middle of the backward pass.
//!
//! A model gets `anchor.apply_op1(GradientHook)` for a parameter. candle calls [`GradientHook::bwd`] exactly once per
//! backward of a graph, when every consumer of the parameter in it has contributed: the gradient goes straight into its bucket, and
//! `None` keeps it out of candle's gradient store.

use crate::backward_scope::{is_of_another, note_reached};
use crate::parameters::Receivers;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Storage, Tensor, Var};
use std::sync::{Mutex, PoisonError};

/// The op that hands a parameter's data out and takes its gradient in.
pub(crate) struct GradientHook {
    number: usize,
    shape: Shape,
    /// The data, until the op has run.
    data: Mutex<Option<CpuStorage>>,
    receivers: Receivers,
}

impl GradientHook {
    pub(crate) fn new(number: usize, shape: Shape, data: CpuStorage, receivers: Receivers) -> Self {
        Self {
            number,
            shape,
            data: Mutex::new(Some(data)),
            receivers,
        }
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
        if is_of_another(&self.receivers.gradients) {
            note_reached(&self.receivers.units);
            return Ok(None);
        }
        let is_complete = self.receivers.gradients.accept(self.number, gradient)?;
        if let Some(units) = self.receivers.units.upgrade().filter(|_| is_complete) {
            units.gradient_came(self.number)?;
        }
        Ok(None)
    }
}

/// Makes the leaf that makes a parameter reachable for backward: shape and identity, no data.
///
/// The leaf is seen only by the hook, which ignores its storage.
pub(crate) fn anchor(shape: &Shape, device: &Device) -> crate::Result<Tensor> {
    match device {
        Device::Cpu => {
            let empty = Storage::Cpu(CpuStorage::F32(Vec::new()));
            let leaf = Tensor::from_storage(empty, shape.clone(), BackpropOp::none(), true);
            Ok(Var::from_tensor(&leaf)?.into_inner())
        }
        other => Err(candle_core::Error::msg(format!(
            "managed parameters on {other:?}: this version trains on the CPU; build the model on Device::Cpu"
        ))
        .into()),
    }
}
