//! The hook through which a parameter's gradient is caught in the middle of the backward pass.
//!
//! A model gets `anchor.apply_op1(GradientHook)` for a parameter. candle calls [`GradientHook::bwd`] exactly once per
//! backward of a graph, when every consumer of the parameter in it has contributed: the gradient goes straight into its bucket, and
//! `None` keeps it out of candle's gradient store.

use crate::backward_scope::{is_of_another, note_reached};
use crate::parameters::Receivers;
use candle_core::backend::BackendDevice;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Storage, Tensor, Var};
use std::sync::{Mutex, PoisonError};

/// The op that hands a parameter's data out and takes its gradient in.
pub(crate) struct GradientHook {
    number: usize,
    shape: Shape,
    /// The data, until the op has run.
    data: Mutex<Option<Storage>>,
    receivers: Receivers,
}

impl GradientHook {
    pub(crate) fn new(number: usize, shape: Shape, data: Storage, receivers: Receivers) -> Self {
        Self {
            number,
            shape,
            data: Mutex::new(Some(data)),
            receivers,
        }
    }

    fn data(&self) -> Result<Storage> {
        let data = self.data.lock().unwrap_or_else(PoisonError::into_inner).take();
        data.ok_or_else(|| candle_core::Error::msg("a managed parameter is made once"))
    }
}

impl CustomOp1 for GradientHook {
    fn name(&self) -> &'static str {
        "managed-parameter"
    }

    fn cpu_fwd(&self, _anchor: &CpuStorage, _layout: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.data()? {
            Storage::Cpu(data) => Ok((data, self.shape.clone())),
            _ => candle_core::bail!("a managed parameter's data is on another device than its anchor"),
        }
    }

    fn cuda_fwd(&self, _anchor: &CudaStorage, _layout: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.data()? {
            Storage::Cuda(data) => Ok((data, self.shape.clone())),
            _ => candle_core::bail!("a managed parameter's data is on another device than its anchor"),
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

/// Makes the leaf that makes a parameter reachable for backward: shape and identity, no data but one number on a GPU.
///
/// The leaf is seen only by the hook, which ignores its storage.
pub(crate) fn anchor(shape: &Shape, device: &Device) -> Result<Tensor> {
    let storage = match device {
        Device::Cpu => Storage::Cpu(CpuStorage::F32(Vec::new())),
        Device::Cuda(device) => Storage::Cuda(device.zeros_impl(&Shape::from(1), DType::F32)?),
        Device::Metal(_) => candle_core::bail!("managed parameters are on the CPU or on CUDA devices, not on Metal"),
    };
    let leaf = Tensor::from_storage(storage, shape.clone(), BackpropOp::none(), true);
    Ok(Var::from_tensor(&leaf)?.into_inner())
}
