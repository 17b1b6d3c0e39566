//! Checks of what a layer is given, with errors that name the layer, the tensor and the expectation.

use candle_core::{DType, Result, Tensor, bail};

/// # Errors
///
/// Fails unless the tensor holds floating-point numbers.
pub(super) fn expect_float(operation: &str, name: &str, tensor: &Tensor) -> Result<()> {
    if !tensor.dtype().is_float() {
        bail!(
            "{operation}: expected {name} to hold floating-point numbers, got {:?} {:?}",
            tensor.dtype(),
            tensor.dims()
        );
    }
    Ok(())
}

/// # Errors
///
/// Fails unless the tensor has exactly this shape.
pub(super) fn expect_shape(operation: &str, name: &str, tensor: &Tensor, expected: &[usize]) -> Result<()> {
    if tensor.dims() != expected {
        bail!(
            "{operation}: expected {name} of shape {expected:?}, got {:?}",
            tensor.dims()
        );
    }
    Ok(())
}

/// # Errors
///
/// Fails unless the tensor has as many dimensions as `axes` names.
pub(super) fn expect_axes(operation: &str, name: &str, tensor: &Tensor, axes: &[&str]) -> Result<()> {
    if tensor.rank() != axes.len() {
        bail!(
            "{operation}: expected {name} of shape [{}], got {:?}",
            axes.join(", "),
            tensor.dims()
        );
    }
    Ok(())
}

/// # Errors
///
/// Fails unless the tensor has the dtype and the device of `other`.
pub(super) fn expect_like(
    operation: &str,
    name: &str,
    tensor: &Tensor,
    other_name: &str,
    other: &Tensor,
) -> Result<()> {
    if tensor.dtype() != other.dtype() {
        bail!(
            "{operation}: expected {name} to have the dtype of {other_name}, {:?}, got {:?}; \
             convert one with to_dtype",
            other.dtype(),
            tensor.dtype()
        );
    }
    if !tensor.device().same_device(other.device()) {
        bail!(
            "{operation}: expected {name} on the device of {other_name}, {:?}, got {:?}; \
             move one with to_device",
            other.device().location(),
            tensor.device().location()
        );
    }
    Ok(())
}

/// Says whether a parameter is kept in f32 beside inputs that are narrower.
pub(super) fn is_kept_in_f32(parameter: &Tensor, xs: &Tensor) -> bool {
    parameter.dtype() == DType::F32 && matches!(xs.dtype(), DType::BF16 | DType::F16)
}

/// Computes in another dtype, and gives the result in that of the input.
///
/// # Errors
///
/// Those of `compute`.
pub(super) fn computed_in(
    dtype: DType,
    xs: &Tensor,
    compute: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    compute(&xs.to_dtype(dtype)?)?.to_dtype(xs.dtype())
}

/// Returns the size of the last dimension.
///
/// # Errors
///
/// Fails for a scalar.
pub(super) fn last_dimension(operation: &str, name: &str, tensor: &Tensor) -> Result<usize> {
    match tensor.dims().last() {
        Some(&width) => Ok(width),
        None => bail!("{operation}: expected {name} with at least one dimension, got a scalar"),
    }
}
