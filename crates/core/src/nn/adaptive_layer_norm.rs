//! Layer normalisation whose scale and shift depend on the sample, as in diffusion transformers: composed of candle ops,
//! scale and shift cost four passes over the sequence forward and more backward, and keep two tensors of its size.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, D, DType, Layout, Module, Result, Shape, Tensor};

use super::arguments::{expect_axes, expect_float, expect_shape};
use super::element::{CpuTensor, Element, composition_dtype, dense, has_kernel, tensor_like, with_element};
use super::layer_norm::{LayerNorm, differentiate, normalize};

const NAME: &str = "adaptive_layer_norm";

/// Normalises rows by a [`LayerNorm`], then scales and shifts them by what their sample says: `norm(x) · (1 + scale) + shift`
/// (Peebles and Xie 2022, arXiv:2212.09748, section 3.2).
///
/// `xs` has shape `[batch, sequence, size]`, `scale` and `shift` have shape `[batch, size]`; the result has the shape and dtype of
/// `xs`.
///
/// # Errors
///
/// Fails when shapes do not fit together, or tensors hold integers.
pub fn adaptive_layer_norm(norm: &LayerNorm, xs: &Tensor, scale: &Tensor, shift: &Tensor) -> Result<Tensor> {
    expect_float(NAME, "xs", xs)?;
    expect_axes(NAME, "xs", xs, &["batch", "sequence", "size"])?;
    let (batch, _, size) = xs.dims3()?;
    expect_shape(NAME, "scale", scale, &[batch, size])?;
    expect_shape(NAME, "shift", shift, &[batch, size])?;
    expect_shape(NAME, "the norm's weight", norm.weight(), &[size])?;
    if !has_kernel(xs) {
        return compose(norm, xs, scale, shift);
    }
    // The sample's weight and bias, which are small: the pass over the sequence is that of a layer norm.
    let scale = (scale.to_dtype(DType::F32)? + 1.0)?;
    let weight = scale.broadcast_mul(&norm.weight().to_dtype(DType::F32)?)?;
    let shift = shift.to_dtype(DType::F32)?;
    let bias = match norm.bias() {
        Some(bias) => (scale.broadcast_mul(&bias.to_dtype(DType::F32)?)? + shift)?,
        None => shift.contiguous()?,
    };
    let op = SampleNormalization { eps: norm.eps() as f32 };
    xs.contiguous()?.apply_op3(&weight, &bias, op)
}

fn compose(norm: &LayerNorm, xs: &Tensor, scale: &Tensor, shift: &Tensor) -> Result<Tensor> {
    let dtype = composition_dtype(xs.dtype());
    let bias = norm.bias().map(|bias| bias.to_dtype(dtype)).transpose()?;
    let wide = LayerNorm::new(norm.weight().to_dtype(dtype)?, bias, norm.eps());
    wide.forward(&xs.to_dtype(dtype)?)?
        .broadcast_mul(&(scale.to_dtype(dtype)? + 1.0)?.unsqueeze(1)?)?
        .broadcast_add(&shift.to_dtype(dtype)?.unsqueeze(1)?)?
        .to_dtype(xs.dtype())
}

/// Normalisation with a weight and a bias of each sample, in `f32`.
struct SampleNormalization {
    eps: f32,
}

impl CustomOp3 for SampleNormalization {
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
        let width = layout.dim(D::Minus1)?;
        let sample = layout.dim(1)? * width;
        let weights = dense::<f32>(NAME, weight, weight_layout)?;
        let biases = dense::<f32>(NAME, bias, bias_layout)?;
        with_element!(xs.dtype(), NAME, T => {
            let xs = dense::<T>(NAME, xs, layout)?;
            let mut out = bytemuck::zeroed_vec::<T>(xs.len());
            // Chunks of nothing are refused.
            let samples = out.chunks_exact_mut(sample.max(1)).zip(xs.chunks_exact(sample.max(1)));
            let parameters = weights.chunks_exact(width.max(1)).zip(biases.chunks_exact(width.max(1)));
            for ((out, xs), (weight, bias)) in samples.zip(parameters) {
                normalize(xs, weight, Some(bias), self.eps, out);
            }
            Ok((T::store(out), layout.shape().clone()))
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
        let (batch, rows, width) = xs.dims3()?;
        let gradient = gradient.contiguous()?;
        let [x_lock, w_lock, g_lock] = [xs, weight, &gradient].map(|tensor| CpuTensor::lock(NAME, tensor));
        let weights = w_lock.elements::<f32>()?;
        let (mut dw, mut db) = (Vec::with_capacity(batch * width), Vec::with_capacity(batch * width));
        with_element!(xs.dtype(), NAME, T => {
            let (x, g) = (x_lock.elements::<T>()?, g_lock.elements::<T>()?);
            let mut dx = bytemuck::zeroed_vec::<T>(x.len());
            for number in 0..batch {
                let of_sample = number * rows * width..(number + 1) * rows * width;
                let weight = &weights[number * width..][..width];
                let (x, g, dx) = (&x[of_sample.clone()], &g[of_sample.clone()], &mut dx[of_sample]);
                let [of_weight, of_bias] = differentiate(x, weight, g, self.eps, dx);
                dw.extend(of_weight);
                db.extend(of_bias);
            }
            Ok((
                xs.track_op().then(|| tensor_like(dx, xs)).transpose()?,
                weight.track_op().then(|| tensor_like(dw, weight)).transpose()?,
                bias.track_op().then(|| tensor_like(db, bias)).transpose()?,
            ))
        })
    }
}
