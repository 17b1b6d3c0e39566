//! Gates around a unit: ops that hand a tensor on unchanged and tell, in the backward pass, that the unit begins or ends.

use crate::units::{Invocation, Units};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor};
use std::sync::Arc;

/// Hands a unit's output on; its backward comes before that of anything in the unit.
pub(crate) struct OutputGate {
    pub(crate) units: Arc<Units>,
    pub(crate) unit: usize,
    pub(crate) invocation: Arc<Invocation>,
}

/// Hands a unit's input on; its backward comes after that of everything in the unit that depends on the input.
pub(crate) struct InputGate {
    pub(crate) units: Arc<Units>,
    pub(crate) unit: usize,
    pub(crate) invocation: Arc<Invocation>,
}

impl CustomOp1 for OutputGate {
    fn name(&self) -> &'static str {
        "unit-output"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        copy(storage, layout)
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        copy_on_device(storage, layout)
    }

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.units.enter_backward(self.unit, &self.invocation)?;
        Ok(Some(gradient.clone()))
    }
}

impl CustomOp1 for InputGate {
    fn name(&self) -> &'static str {
        "unit-input"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        copy(storage, layout)
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        copy_on_device(storage, layout)
    }

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        self.units.input_done(self.unit, &self.invocation)?;
        Ok(Some(gradient.clone()))
    }
}

/// Copies the elements of a contiguous tensor: an op's result has storage of its own.
pub(crate) fn copy(storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        candle_core::bail!("a gate is for contiguous tensors");
    };
    let copied = match storage {
        CpuStorage::F32(all) => CpuStorage::F32(all[start..end].to_vec()),
        CpuStorage::BF16(all) => CpuStorage::BF16(all[start..end].to_vec()),
        CpuStorage::F16(all) => CpuStorage::F16(all[start..end].to_vec()),
        CpuStorage::F64(all) => CpuStorage::F64(all[start..end].to_vec()),
        _ => candle_core::bail!(
            "a unit's inputs and outputs that have gradients are f32, bf16, f16 or f64; convert them first"
        ),
    };
    Ok((copied, layout.shape().clone()))
}

/// Copies the elements of a tensor on a device.
pub(crate) fn copy_on_device(storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
    let mut copied = storage.device().zeros_impl(layout.shape(), storage.dtype())?;
    storage.copy_strided_src(&mut copied, 0, layout)?;
    Ok((copied, layout.shape().clone()))
}
