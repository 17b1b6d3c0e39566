//! The activation of transformers' feed-forward blocks outside of Llama's kind as one op: candle's own makes a dozen
//! passes backward, with constants of six digits.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use multiversion::multiversion;

use super::arguments::expect_float;
use super::element::{CpuTensor, Element, composition_dtype, dense, has_kernel, tensor_like, with_element};
use super::exponential::sigmoid;
use super::row_blocks;

const NAME: &str = "gelu_tanh";

/// Twice the root of 2 / π, and the same times 0.044715.
const LINEAR: f32 = 1.595_769;
const CUBIC: f32 = 0.071_354_81;

/// Computes `x / 2 · (1 + tanh(√(2/π) (x + 0.044715 x³)))`, the approximation of `x Φ(x)` of Hendrycks and Gimpel (2016,
/// arXiv:1606.08415): PyTorch's `gelu(approximate="tanh")`.
///
/// The input has any shape and floating-point dtype, and the result has the same.
///
/// # Errors
///
/// Fails when `xs` holds integers.
pub fn gelu_tanh(xs: &Tensor) -> Result<Tensor> {
    expect_float(NAME, "xs", xs)?;
    if has_kernel(xs) {
        return xs.contiguous()?.apply_op1(Gelu);
    }
    compose(xs)
}

fn compose(xs: &Tensor) -> Result<Tensor> {
    let wide = xs.to_dtype(composition_dtype(xs.dtype()))?;
    let inner = ((&wide * (wide.sqr()? * 0.044_715)?)? + &wide)?;
    let tanh = (inner * (2.0 / std::f64::consts::PI).sqrt())?.tanh()?;
    ((wide * 0.5)? * (tanh + 1.0)?)?.to_dtype(xs.dtype())
}

struct Gelu;

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, xs: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        with_element!(xs.dtype(), NAME, T => {
            let xs = dense::<T>(NAME, xs, layout)?;
            let mut out = bytemuck::zeroed_vec::<T>(xs.len());
            let block = row_blocks::independent(1);
            row_blocks::for_each(&mut out, block, |index, out| {
                forward_block(&xs[index * block..][..out.len()], out);
            });
            Ok((T::store(out), layout.shape().clone()))
        })
    }

    fn bwd(&self, xs: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let gradient = gradient.contiguous()?;
        let (x_lock, gradient) = (CpuTensor::lock(NAME, xs), CpuTensor::lock(NAME, &gradient));
        with_element!(xs.dtype(), NAME, T => {
            let (x, g) = (x_lock.elements::<T>()?, gradient.elements::<T>()?);
            let mut dx = bytemuck::zeroed_vec::<T>(x.len());
            let block = row_blocks::independent(1);
            row_blocks::for_each(&mut dx, block, |index, dx| {
                let range = index * block..index * block + dx.len();
                backward_block(&x[range.clone()], &g[range], dx);
            });
            tensor_like(dx, xs).map(Some)
        })
    }
}

/// `(1 + tanh(u)) / 2` is the logistic function of `2 u`.
#[multiversion(targets = "simd")]
fn forward_block<T: Element>(xs: &[T], out: &mut [T]) {
    for (out, &x) in out.iter_mut().zip(xs) {
        let x = x.widen();
        *out = T::round(x * sigmoid(x * (LINEAR + CUBIC * x * x)));
    }
}

/// With `s` the logistic function of `2 u`: `dy / dx = s + x s (1 - s) · 2 u'`.
#[multiversion(targets = "simd")]
fn backward_block<T: Element>(xs: &[T], gradient: &[T], dx: &mut [T]) {
    for ((dx, &x), &g) in dx.iter_mut().zip(xs).zip(gradient) {
        let x = x.widen();
        let s = sigmoid(x * (LINEAR + CUBIC * x * x));
        let slope = s * (1.0 - s) * x * (LINEAR + 3.0 * CUBIC * x * x);
        // Far out the square overflows where the slope has long been 0.
        let slope = if s == 0.0 || s == 1.0 { 0.0 } else { slope };
        *dx = T::round(g.widen() * (s + slope));
    }
}
