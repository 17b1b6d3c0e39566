//! Softmax with a backward: `candle_nn::ops::softmax_last_dim` has none, and its differentiable
//! `softmax` makes six passes forward and more than twenty backward.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor};
use multiversion::multiversion;

use super::arguments::{expect_float, last_dimension};
use super::element::{CpuTensor, Element, composition_dtype, dense, has_kernel, tensor_like, with_element};
use super::exponential::exp;
use super::{lanes, row_blocks};

const NAME: &str = "softmax";

/// Normalises the exponentials of `xs` over the last dimension: `e^x_i / Σ_j e^x_j`.
///
/// `xs` has any shape with at least one dimension and any floating-point dtype; the result has the
/// same. A row that is minus infinity throughout gives NaN, as in PyTorch.
///
/// # Errors
///
/// Fails when `xs` is a scalar or holds integers.
pub fn softmax(xs: &Tensor) -> Result<Tensor> {
    expect_float(NAME, "xs", xs)?;
    last_dimension(NAME, "xs", xs)?;
    if xs.elem_count() == 0 {
        // candle's reductions refuse empty tensors.
        return Ok(xs.clone());
    }
    if has_kernel(xs) {
        xs.contiguous()?.apply_op1(Softmax)
    } else {
        compose(xs)
    }
}

fn compose(xs: &Tensor) -> Result<Tensor> {
    let wide = xs.to_dtype(composition_dtype(xs.dtype()))?;
    candle_nn::ops::softmax(&wide, D::Minus1)?.to_dtype(xs.dtype())
}

/// What a backward pass needs in order to compute the softmax of a row again:
/// `e^(x - maximum) · inverse_sum`.
///
/// Unlike their logarithmic sum, the two lose no precision when the row is far from zero.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RowStatistics {
    pub(super) maximum: f32,
    pub(super) inverse_sum: f32,
}

struct Softmax;

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let width = layout.dim(D::Minus1)?;
        with_element!(storage.dtype(), NAME, T => {
            let xs = dense::<T>(NAME, storage, layout)?;
            let mut out = bytemuck::zeroed_vec::<T>(xs.len());
            let block = row_blocks::independent(width) * width;
            row_blocks::for_each(&mut out, block, |index, out| {
                softmax_rows(&xs[index * block..][..out.len()], out, width);
            });
            Ok((T::store(out), layout.shape().clone()))
        })
    }

    /// With `y` the result and `g` its gradient: `dx = y (g - Σ_j g_j y_j)`.
    ///
    /// The result is computed again, not read: in bf16 it has been rounded already.
    fn bwd(&self, xs: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let width = xs.dim(D::Minus1)?;
        let gradient = gradient.contiguous()?;
        let (x_lock, gradient) = (CpuTensor::lock(NAME, xs), CpuTensor::lock(NAME, &gradient));
        with_element!(xs.dtype(), NAME, T => {
            let (x, g) = (x_lock.elements::<T>()?, gradient.elements::<T>()?);
            let mut out = bytemuck::zeroed_vec::<T>(x.len());
            let block = row_blocks::independent(width) * width;
            row_blocks::for_each(&mut out, block, |index, out| {
                let range = index * block..index * block + out.len();
                gradient_rows(&x[range.clone()], &g[range], out, width);
            });
            tensor_like(out, xs).map(Some)
        })
    }
}

#[multiversion(targets = "simd")]
fn softmax_rows<T: Element>(xs: &[T], out: &mut [T], width: usize) {
    let mut exponentials = vec![0f32; width];
    for (xs, out) in xs.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let scale = 1.0 / exponentiate(xs, &mut exponentials);
        for (out, &exponential) in out.iter_mut().zip(&exponentials) {
            *out = T::round(exponential * scale);
        }
    }
}

#[multiversion(targets = "simd")]
fn gradient_rows<T: Element>(xs: &[T], gs: &[T], out: &mut [T], width: usize) {
    let mut exponentials = vec![0f32; width];
    let rows = xs.chunks_exact(width).zip(gs.chunks_exact(width));
    for (out, (xs, gs)) in out.chunks_exact_mut(width).zip(rows) {
        let scale = 1.0 / exponentiate(xs, &mut exponentials);
        let along = lanes::sum_pairs(&exponentials, gs, |e, g| e * g.widen()) * scale;
        for ((out, &exponential), &g) in out.iter_mut().zip(&exponentials).zip(gs) {
            *out = T::round(exponential * scale * (g.widen() - along));
        }
    }
}

/// Writes `e^(x - max(xs))` and returns the sum.
#[inline(always)]
fn exponentiate<T: Element>(xs: &[T], exponentials: &mut [f32]) -> f32 {
    let maximum = lanes::maximum(xs);
    for (exponential, x) in exponentials.iter_mut().zip(xs) {
        *exponential = x.widen() - maximum;
    }
    lanes::replace_and_sum(exponentials, exp)
}
