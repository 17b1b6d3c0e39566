//! Layer normalisation with a backward: `candle_nn::LayerNorm` cuts the autograd graph on contiguous
//! input (huggingface/candle #2168).

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, D, DType, Layout, Module, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use multiversion::multiversion;

use super::arguments::{computed_in, expect_float, expect_like, expect_shape, is_kept_in_f32, last_dimension};
use super::element::{CpuTensor, Element, composition_dtype, dense, has_kernel, tensor_like, with_element};
use super::{lanes, row_blocks};

const NAME: &str = "layer_norm";

/// Shifts and scales each row to zero mean and unit variance, then applies a weight and a bias per
/// column: `y_i = w_i (x_i - mean(x)) / sqrt(var(x) + eps) + b_i` (Ba, Kiros and Hinton, 2016,
/// arXiv:1607.06450). The variance is that of the population, as in PyTorch.
///
/// The input has shape `[.., size]` and the weight's dtype, or 16 bits beside a weight that is kept in f32; the output
/// has those of the input.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
}

/// Creates a [`LayerNorm`] over rows of `size` elements from the parameters `weight`, initially ones,
/// and `bias`, initially zeros.
///
/// # Errors
///
/// Fails when `vb` lacks either parameter of shape `[size]`.
pub fn layer_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    let weight = vb.get_with_hints(size, "weight", candle_nn::init::ONE)?;
    let bias = vb.get_with_hints(size, "bias", candle_nn::init::ZERO)?;
    Ok(LayerNorm::new(weight, Some(bias), eps))
}

impl LayerNorm {
    /// Creates the layer from a weight and an optional bias of shape `[size]`; `eps` is added to the
    /// variance.
    pub fn new(weight: Tensor, bias: Option<Tensor>, eps: f64) -> Self {
        Self { weight, bias, eps }
    }

    /// Returns the weight, of shape `[size]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias, of shape `[size]`, if there is one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns what is added to the variance.
    pub(super) fn eps(&self) -> f64 {
        self.eps
    }

    fn compose(&self, xs: &Tensor) -> Result<Tensor> {
        let dtype = composition_dtype(xs.dtype());
        let wide = xs.to_dtype(dtype)?;
        let centred = wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)?;
        let deviation = (centred.sqr()?.mean_keepdim(D::Minus1)? + self.eps)?.sqrt()?;
        let scaled = centred
            .broadcast_div(&deviation)?
            .broadcast_mul(&self.weight.to_dtype(dtype)?)?;
        let shifted = match &self.bias {
            Some(bias) => scaled.broadcast_add(&bias.to_dtype(dtype)?)?,
            None => scaled,
        };
        shifted.to_dtype(xs.dtype())
    }
}

impl Module for LayerNorm {
    /// # Errors
    ///
    /// Fails when `xs` does not have the shape `[.., size]`, the dtype or the device of the weight, or
    /// when the bias does not match the weight.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        if is_kept_in_f32(&self.weight, xs) {
            return computed_in(DType::F32, xs, |xs| self.forward(xs));
        }
        expect_float(NAME, "xs", xs)?;
        let width = last_dimension(NAME, "xs", xs)?;
        expect_shape(NAME, "weight", &self.weight, &[width])?;
        expect_like(NAME, "xs", xs, "weight", &self.weight)?;
        if let Some(bias) = &self.bias {
            expect_shape(NAME, "bias", bias, &[width])?;
            expect_like(NAME, "bias", bias, "weight", &self.weight)?;
        }
        if !has_kernel(xs) {
            return self.compose(xs);
        }
        let (xs, weight) = (xs.contiguous()?, self.weight.contiguous()?);
        let op = Normalization { eps: self.eps as f32 };
        match &self.bias {
            Some(bias) => xs.apply_op3(&weight, &bias.contiguous()?, op),
            None => xs.apply_op2(&weight, op),
        }
    }
}

/// The op recomputes mean and variance in backward: two more passes over a row that is in cache cost
/// less than memory that lives from forward to backward.
struct Normalization {
    eps: f32,
}

struct Gradients {
    xs: Tensor,
    weight: Tensor,
    bias: Tensor,
}

impl Normalization {
    fn forward<T: Element>(&self, xs: &[T], weight: &[T], bias: Option<&[T]>) -> CpuStorage {
        let mut out = bytemuck::zeroed_vec::<T>(xs.len());
        normalize(xs, weight, bias, self.eps, &mut out);
        T::store(out)
    }

    fn gradients(&self, xs: &Tensor, weight: &Tensor, gradient: &Tensor) -> Result<Gradients> {
        let gradient = gradient.contiguous()?;
        let x_lock = CpuTensor::lock(NAME, xs);
        let weight_lock = CpuTensor::lock(NAME, weight);
        let gradient = CpuTensor::lock(NAME, &gradient);
        with_element!(xs.dtype(), NAME, T => {
            let (x, w, g) = (x_lock.elements::<T>()?, weight_lock.elements::<T>()?, gradient.elements::<T>()?);
            let mut dx = bytemuck::zeroed_vec::<T>(x.len());
            let [dw, db] = differentiate(x, w, g, self.eps, &mut dx);
            Ok(Gradients {
                xs: tensor_like(dx, xs)?,
                weight: tensor_like(T::round_all(dw), weight)?,
                bias: tensor_like(T::round_all(db), weight)?,
            })
        })
    }
}

impl CustomOp3 for Normalization {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        xs: &CpuStorage,
        layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        with_element!(xs.dtype(), NAME, T => {
            let weight = dense::<T>(NAME, weight, weight_layout)?;
            let bias = dense::<T>(NAME, bias, bias_layout)?;
            let out = self.forward(dense::<T>(NAME, xs, layout)?, weight, Some(bias));
            Ok((out, layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        xs: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let gradients = self.gradients(xs, weight, gradient)?;
        Ok((
            xs.track_op().then_some(gradients.xs),
            weight.track_op().then_some(gradients.weight),
            bias.track_op().then_some(gradients.bias),
        ))
    }
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
        with_element!(xs.dtype(), NAME, T => {
            let weight = dense::<T>(NAME, weight, weight_layout)?;
            let out = self.forward(dense::<T>(NAME, xs, layout)?, weight, None);
            Ok((out, layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        xs: &Tensor,
        weight: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradients = self.gradients(xs, weight, gradient)?;
        Ok((
            xs.track_op().then_some(gradients.xs),
            weight.track_op().then_some(gradients.weight),
        ))
    }
}

/// Normalises rows.
pub(super) fn normalize<T: Element, W: Element>(xs: &[T], weight: &[W], bias: Option<&[W]>, eps: f32, out: &mut [T]) {
    let block = row_blocks::independent(weight.len()) * weight.len();
    row_blocks::for_each(out, block, |index, out| {
        normalize_rows(&xs[index * block..][..out.len()], weight, bias, eps, out);
    });
}

/// Writes the gradient of rows; returns those of weight and bias, which are sums over the rows.
pub(super) fn differentiate<T: Element, W: Element>(
    xs: &[T],
    weight: &[W],
    gs: &[T],
    eps: f32,
    dx: &mut [T],
) -> [Vec<f32>; 2] {
    let width = weight.len();
    let block = row_blocks::summed(xs.len() / width.max(1), width) * width;
    // A row of partial sums is the weight's, then the bias's.
    let mut partials = vec![0f32; xs.len().div_ceil(block.max(1)) * 2 * width];
    row_blocks::for_each_pair((dx, block), (&mut partials, 2 * width), |index, dx, sums| {
        let range = index * block..index * block + dx.len();
        let (dw, db) = sums.split_at_mut(width);
        gradient_rows(&xs[range.clone()], weight, &gs[range], eps, dx, dw, db);
    });
    let mut dw = row_blocks::sum_rows(&partials, 2 * width);
    let db = dw.split_off(width);
    [dw, db]
}

/// Returns the mean and the reciprocal of the standard deviation. The mean is taken off before
/// squaring: a row far from zero would lose its variance to rounding otherwise.
#[inline(always)]
fn moments<T: Element>(xs: &[T], eps: f32) -> (f32, f32) {
    let width = xs.len() as f32;
    let mean = lanes::sum(xs, T::widen) / width;
    let variance = lanes::sum(xs, |x| (x.widen() - mean) * (x.widen() - mean)) / width;
    (mean, 1.0 / (variance + eps).sqrt())
}

#[multiversion(targets = "simd")]
fn normalize_rows<T: Element, W: Element>(xs: &[T], weight: &[W], bias: Option<&[W]>, eps: f32, out: &mut [T]) {
    let width = weight.len();
    for (xs, out) in xs.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let (mean, scale) = moments(xs, eps);
        let columns = out.iter_mut().zip(xs).zip(weight);
        match bias {
            Some(bias) => {
                for (((out, &x), &w), &b) in columns.zip(bias) {
                    *out = T::round((x.widen() - mean) * scale * w.widen() + b.widen());
                }
            }
            None => {
                for ((out, &x), &w) in columns {
                    *out = T::round((x.widen() - mean) * scale * w.widen());
                }
            }
        }
    }
}

/// With `n` the normalised row, `r` the reciprocal deviation and `d = w g`:
/// `dx = r (d - mean(d) - n mean(d n))`, `dw += g n`, `db += g`.
#[multiversion(targets = "simd")]
fn gradient_rows<T: Element, W: Element>(
    xs: &[T],
    weight: &[W],
    gs: &[T],
    eps: f32,
    dx: &mut [T],
    dw: &mut [f32],
    db: &mut [f32],
) {
    let width = weight.len();
    let rows = xs.chunks_exact(width).zip(gs.chunks_exact(width));
    for (dx, (xs, gs)) in dx.chunks_exact_mut(width).zip(rows) {
        let (mean, scale) = moments(xs, eps);
        let (sum, along) = lanes::sum_triples(xs, weight, gs, |x, w, g| {
            let d = w.widen() * g.widen();
            (d, d * ((x.widen() - mean) * scale))
        });
        let (sum, along) = (sum / width as f32, along / width as f32);
        for ((dx, &x), (&g, &w)) in dx.iter_mut().zip(xs).zip(gs.iter().zip(weight)) {
            let normalized = (x.widen() - mean) * scale;
            *dx = T::round(scale * (w.widen() * g.widen() - sum - normalized * along));
        }
        for ((dw, db), (&x, &g)) in dw.iter_mut().zip(db.iter_mut()).zip(xs.iter().zip(gs)) {
            *dw += g.widen() * ((x.widen() - mean) * scale);
            *db += g.widen();
        }
    }
}
