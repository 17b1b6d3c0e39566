//! The element types the fused layers compute on, and access to a tensor's elements.
//!
//! A fused layer has one kernel for `f32` and `bf16`: it widens each element to `f32`, computes in
//! `f32`, and rounds each result once. Every other dtype, and every other device, takes the layer's
//! composition of candle ops instead.

use bytemuck::Zeroable;
use candle_core::{CpuStorage, DType, Device, Layout, Result, Storage, StorageRef, Tensor, WithDType};
use half::bf16;
use std::cell::Cell;

/// An element that is computed on in `f32`.
pub(super) trait Element: WithDType + Zeroable + Copy + Send + Sync {
    /// Converts to `f32`, exactly.
    fn widen(self) -> f32;

    /// Rounds to the nearest representable value, ties to even.
    fn round(value: f32) -> Self;

    /// Views the elements as `f32` where no conversion is needed.
    fn as_f32(elements: &[Self]) -> Option<&[f32]>;

    /// Wraps elements as a storage, without a copy.
    fn store(elements: Vec<Self>) -> CpuStorage {
        Self::to_cpu_storage_owned(elements)
    }

    /// Rounds every value; free where no conversion is needed.
    fn round_all(values: Vec<f32>) -> Vec<Self>;
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn round(value: f32) -> Self {
        value
    }

    fn as_f32(elements: &[Self]) -> Option<&[f32]> {
        Some(elements)
    }

    fn round_all(values: Vec<f32>) -> Vec<Self> {
        values
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    // `bf16::from_f32` branches on NaN, which keeps the loops around it scalar.
    #[inline(always)]
    fn round(value: f32) -> Self {
        let bits = value.to_bits();
        let ties_to_even = 0x7fff + ((bits >> 16) & 1);
        let rounded = bits.wrapping_add(ties_to_even) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        let chosen = if value.is_nan() { quiet_nan } else { rounded };
        Self::from_bits(chosen as u16)
    }

    fn as_f32(_: &[Self]) -> Option<&[f32]> {
        None
    }

    fn round_all(values: Vec<f32>) -> Vec<Self> {
        values.into_iter().map(<Self as Element>::round).collect()
    }
}

/// Evaluates `$body` with `$element` bound to the element type of `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $operation:expr, $element:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $element = f32;
                $body
            }
            candle_core::DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            dtype => Err(candle_core::Error::UnsupportedDTypeForOp(dtype, $operation).bt()),
        }
    };
}
pub(super) use with_element;

thread_local! {
    /// Whether layers on this thread do on the CPU what they do elsewhere.
    static COMPOSES: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` with the layers as they are on a GPU, whatever the device: as compositions of candle ops. For tests.
#[doc(hidden)]
pub fn as_compositions<R>(work: impl FnOnce() -> R) -> R {
    /// Resets it also after a panic.
    struct Reset(bool);
    impl Drop for Reset {
        fn drop(&mut self) {
            COMPOSES.set(self.0);
        }
    }
    let _reset = Reset(COMPOSES.replace(true));
    work()
}

/// Returns whether a layer may use what is written for the CPU.
pub(super) fn is_on_cpu(xs: &Tensor) -> bool {
    xs.device().is_cpu() && !COMPOSES.get()
}

/// Returns whether the fused kernels serve this dtype on this device.
pub(super) fn has_kernel(xs: &Tensor) -> bool {
    is_on_cpu(xs) && matches!(xs.dtype(), DType::F32 | DType::BF16)
}

/// Returns the dtype in which the compositions of candle ops compute.
pub(super) fn composition_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Returns the elements of a row-major storage in order.
///
/// # Errors
///
/// Fails when the layout is not row-major, or the storage holds another element type or too few
/// elements: those of a sharded parameter are away while its unit does not run.
pub(super) fn dense<'a, T: Element>(
    operation: &'static str,
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<&'a [T]> {
    let Some((start, end)) = layout.contiguous_offsets() else {
        return Err(candle_core::Error::RequiresContiguous { op: operation }.bt());
    };
    let elements = T::cpu_storage_as_slice(storage)?;
    expect_resident(operation, elements, end, layout)?;
    Ok(&elements[start..end])
}

/// # Errors
///
/// Fails when a storage does not reach to `end`, where the layout does.
pub(super) fn expect_resident<T: Element>(operation: &str, elements: &[T], end: usize, layout: &Layout) -> Result<()> {
    if end > elements.len() {
        candle_core::bail!(
            "{operation}: expected a storage of at least {end} elements for a tensor {:?}, got {}; \
             a sharded parameter can only be used while its unit is gathered",
            layout.dims(),
            elements.len()
        );
    }
    Ok(())
}

/// A read lock on a CPU tensor's storage.
///
/// Backward functions are given tensors, not storages, and compute several gradients in one pass,
/// which a custom op with its single result cannot.
pub(super) struct CpuTensor<'a> {
    operation: &'static str,
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> CpuTensor<'a> {
    pub(super) fn lock(operation: &'static str, tensor: &'a Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        Self {
            operation,
            storage,
            layout,
        }
    }

    /// Returns the storage and the layout to read it with.
    ///
    /// # Errors
    ///
    /// Fails when the tensor lives on another device.
    pub(super) fn parts(&self) -> Result<(&CpuStorage, &Layout)> {
        match &*self.storage {
            Storage::Cpu(storage) => Ok((storage, self.layout)),
            _ => candle_core::bail!("{}: expected a tensor on the CPU", self.operation),
        }
    }

    /// Returns the elements of a row-major tensor in order.
    ///
    /// # Errors
    ///
    /// As [`parts`](Self::parts) and [`dense`].
    pub(super) fn elements<T: Element>(&self) -> Result<&[T]> {
        let (storage, layout) = self.parts()?;
        dense(self.operation, storage, layout)
    }
}

/// Wraps computed elements as a CPU tensor of the same shape as `like`, without a copy.
pub(super) fn tensor_like<T: Element>(elements: Vec<T>, like: &Tensor) -> Result<Tensor> {
    Tensor::from_vec(elements, like.shape(), &Device::Cpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_to_bf16_agrees_with_half() {
        let patterns = (0..=u32::MAX).step_by(4093).chain([
            0x7f80_0000, // infinity
            0x7f80_0001, // a NaN whose payload lies in the dropped bits
            0xff7f_ffff, // the lowest finite value, which rounds to minus infinity
            0x3f80_8000, // a tie to even downwards
            0x3f81_8000, // a tie to even upwards
        ]);
        for bits in patterns {
            let value = f32::from_bits(bits);
            let ours = <bf16 as Element>::round(value);
            assert_eq!(ours.to_bits(), bf16::from_f32(value).to_bits(), "{bits:#010x}");
            assert_eq!(ours.widen().to_bits(), ours.to_f32().to_bits(), "{bits:#010x}");
        }
    }
}
