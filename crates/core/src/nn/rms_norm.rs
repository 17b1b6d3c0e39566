//! Root-mean-square normalisation with a backward: `candle_nn::RmsNorm` cuts the autograd graph on
//! contiguous input (huggingface/candle #2977).

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, D, DType, Layout, Module, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use multiversion::multiversion;

use super::arguments::{computed_in, expect_float, expect_like, expect_shape, is_kept_in_f32, last_dimension};
use super::element::{CpuTensor, Element, composition_dtype, dense, has_kernel, tensor_like, with_element};
use super::{lanes, row_blocks};

const NAME: &str = "rms_norm";

/// Scales each row to unit root mean square, then by a weight per column:
/// `y_i = w_i x_i / sqrt(mean_j(x_j²) + eps)` (Zhang and Sennrich, 2019, arXiv:1910.07467).
///
/// The input has shape `[.., size]` and the weight's dtype, or 16 bits beside a weight that is kept in f32; the output
/// has those of the input.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Tensor,
    eps: f64,
}

/// Creates an [`RmsNorm`] over rows of `size` elements from the parameter `weight`, initially ones.
///
/// # Errors
///
/// Fails when `vb` has no such parameter of shape `[size]`.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    let weight = vb.get_with_hints(size, "weight", candle_nn::init::ONE)?;
    Ok(RmsNorm::new(weight, eps))
}

impl RmsNorm {
    /// Creates the layer from a weight of shape `[size]`; `eps` is added to the mean square.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self { weight, eps }
    }

    /// Returns the weight, of shape `[size]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    fn compose(&self, xs: &Tensor) -> Result<Tensor> {
        let dtype = composition_dtype(xs.dtype());
        let wide = xs.to_dtype(dtype)?;
        let root = (wide.sqr()?.mean_keepdim(D::Minus1)? + self.eps)?.sqrt()?;
        wide.broadcast_div(&root)?
            .broadcast_mul(&self.weight.to_dtype(dtype)?)?
            .to_dtype(xs.dtype())
    }
}

impl Module for RmsNorm {
    /// # Errors
    ///
    /// Fails when `xs` does not have the shape `[.., size]`, the dtype or the device of the weight.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        if is_kept_in_f32(&self.weight, xs) {
            return computed_in(DType::F32, xs, |xs| self.forward(xs));
        }
        expect_float(NAME, "xs", xs)?;
        expect_shape(NAME, "weight", &self.weight, &[last_dimension(NAME, "xs", xs)?])?;
        expect_like(NAME, "xs", xs, "weight", &self.weight)?;
        if has_kernel(xs) {
            xs.contiguous()?
                .apply_op2(&self.weight.contiguous()?, Normalization { eps: self.eps as f32 })
        } else {
            self.compose(xs)
        }
    }
}

/// The op recomputes the root mean square in backward: one more pass over a row that is in cache
/// costs less than memory that lives from forward to backward.
struct Normalization {
    eps: f32,
}

impl CustomOp2 for Normalization {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        xs: &CpuStorage,
        layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let width = layout.dim(D::Minus1)?;
        with_element!(xs.dtype(), NAME, T => {
            let xs = dense::<T>(NAME, xs, layout)?;
            let weight = dense::<T>(NAME, weight, weight_layout)?;
            let mut out = bytemuck::zeroed_vec::<T>(xs.len());
            let block = row_blocks::independent(width) * width;
            row_blocks::for_each(&mut out, block, |index, out| {
                normalize_rows(&xs[index * block..][..out.len()], weight, self.eps, out);
            });
            Ok((T::store(out), layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        xs: &Tensor,
        weight: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let width = xs.dim(D::Minus1)?;
        let gradient = gradient.contiguous()?;
        let x_lock = CpuTensor::lock(NAME, xs);
        let weight_lock = CpuTensor::lock(NAME, weight);
        let gradient = CpuTensor::lock(NAME, &gradient);
        with_element!(xs.dtype(), NAME, T => {
            let (x, w, g) = (x_lock.elements::<T>()?, weight_lock.elements::<T>()?, gradient.elements::<T>()?);
            let mut dx = bytemuck::zeroed_vec::<T>(x.len());
            let rows = row_blocks::summed(x.len() / width.max(1), width);
            let block = rows * width;
            let mut partials = vec![0f32; x.len().div_ceil(block.max(1)) * width];
            row_blocks::for_each_pair((&mut dx, block), (&mut partials, width), |index, dx, dw| {
                let range = index * block..index * block + dx.len();
                gradient_rows(&x[range.clone()], w, &g[range], self.eps, dx, dw);
            });
            let dw = T::round_all(row_blocks::sum_rows(&partials, width));
            Ok((
                xs.track_op().then(|| tensor_like(dx, xs)).transpose()?,
                weight.track_op().then(|| tensor_like(dw, weight)).transpose()?,
            ))
        })
    }
}

#[multiversion(targets = "simd")]
fn normalize_rows<T: Element>(xs: &[T], weight: &[T], eps: f32, out: &mut [T]) {
    let width = weight.len();
    for (xs, out) in xs.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let mean_square = lanes::sum(xs, |x| x.widen() * x.widen()) / width as f32;
        let scale = 1.0 / (mean_square + eps).sqrt();
        for ((out, &x), &w) in out.iter_mut().zip(xs).zip(weight) {
            *out = T::round(x.widen() * scale * w.widen());
        }
    }
}

/// With `r = 1 / sqrt(mean(x²) + eps)`: `dx = r w g - x r³ mean(x w g)` and `dw += g x r`.
#[multiversion(targets = "simd")]
fn gradient_rows<T: Element>(xs: &[T], weight: &[T], gs: &[T], eps: f32, dx: &mut [T], dw: &mut [f32]) {
    let width = weight.len();
    let rows = xs.chunks_exact(width).zip(gs.chunks_exact(width));
    for (dx, (xs, gs)) in dx.chunks_exact_mut(width).zip(rows) {
        let (squares, along) = lanes::sum_triples(xs, weight, gs, |x, w, g| {
            (x.widen() * x.widen(), x.widen() * w.widen() * g.widen())
        });
        let scale = 1.0 / (squares / width as f32 + eps).sqrt();
        let pull = along / width as f32 * scale * scale * scale;
        for ((dx, &x), (&g, &w)) in dx.iter_mut().zip(xs).zip(gs.iter().zip(weight)) {
            *dx = T::round(scale * w.widen() * g.widen() - x.widen() * pull);
        }
        for ((dw, &x), &g) in dw.iter_mut().zip(xs).zip(gs) {
            *dw += g.widen() * x.widen() * scale;
        }
    }
}
