//! Collectives on tensors whose shapes differ between ranks.

use crate::{Error, Result};
use candle_core::Tensor;
use sconce_collectives::Communicator;

/// Pads `dim` at its end with `value` to the largest size that any rank has.
pub(crate) fn pad_across_processes(
    communicator: &dyn Communicator,
    tensor: &Tensor,
    dim: usize,
    value: f64,
) -> Result<Tensor> {
    let shapes = communicator.all_gather_shapes(tensor)?;
    // Checked after the exchange, so that all ranks take part whatever their own tensor is.
    if let Some(rank) = shapes.iter().position(|shape| shape.len() <= dim) {
        return Err(Error::Setting {
            setting: "pad_across_processes dim",
            value: dim.to_string(),
            expected: format!(
                "a dimension that all ranks have; rank {rank} has shape {:?}",
                shapes[rank]
            ),
        });
    }
    let longest = shapes.iter().map(|shape| shape[dim]).max().unwrap_or(0);
    let missing = longest - tensor.dim(dim)?;
    if missing == 0 {
        return Ok(tensor.clone());
    }
    let mut shape = tensor.dims().to_vec();
    shape[dim] = missing;
    let padding = Tensor::full(value, shape, tensor.device())?.to_dtype(tensor.dtype())?;
    Ok(Tensor::cat(&[tensor, &padding], dim)?)
}
