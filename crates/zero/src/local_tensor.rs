//! What one rank holds of the parameters, without asking the others: for state dicts by shares.

use crate::device::Intent;
use crate::parameter::{Home, Master, Parameter, chunk_of};
use crate::storage::ElementsMut;
use crate::{ParameterInfo, Result};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Device, Storage, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// The elements of one parameter that a rank holds.
#[derive(Debug, Clone)]
pub struct LocalTensor {
    /// The parameter.
    pub info: Arc<ParameterInfo>,
    /// Which of the whole parameter's elements, in order, these are; all of them if it is not sharded.
    pub elements: Range<usize>,
    /// Their values, flat, on the CPU, in the dtype that the model computes with.
    pub values: Tensor,
}

impl LocalTensor {
    /// Copies what the rank at `place` (its number, and of how many) holds of a parameter.
    pub(crate) fn of(parameter: &Parameter, (rank, world): (usize, usize)) -> Result<Self> {
        let count = parameter.info.elements();
        let (elements, values) = match &parameter.home {
            Home::Shard { .. } => {
                let elements = chunk_of(count, rank, world);
                let values =
                    parameter.with_master(Intent::Read, &elements, 0..elements.len(), |master| match master {
                        Master::Itself(values) | Master::Apart { copy: values, .. } => copied(&values),
                    })?;
                let values = Tensor::from_storage(Storage::Cpu(values), elements.len(), BackpropOp::none(), false);
                (elements, values)
            }
            Home::Tensor | Home::Beside(_) | Home::Unbuilt => {
                let values = parameter.tensor.flatten_all()?.detach();
                let values = match values.device() {
                    Device::Cpu => values.copy()?,
                    _ => values.to_device(&Device::Cpu)?,
                };
                (0..count, values)
            }
        };
        let info = Arc::clone(&parameter.info);
        Ok(Self { info, elements, values })
    }
}

fn copied(values: &ElementsMut<'_>) -> CpuStorage {
    match values {
        ElementsMut::F32(values) => CpuStorage::F32(values.to_vec()),
        ElementsMut::Bf16(values) => CpuStorage::BF16(values.to_vec()),
        ElementsMut::F16(values) => CpuStorage::F16(values.to_vec()),
    }
}
