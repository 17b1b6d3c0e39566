//! The last projection of a language model and its loss as one op, without the logits: they are by far the largest tensor of a
//! step, and with their gradient they are there twice.
//!
//! The gradients are computed in the forward pass, block of rows by block of rows, while a block's logits are at hand (the
//! Liger kernels' way: Hsu et al. 2024, arXiv:2410.10989): no product is computed twice, and what stays for the backward
//! pass has the size of the inputs. Rows whose label does not count are left out of all products.

use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, DType, Device, Layout, Module, Result, Shape, Tensor, bail};
use multiversion::multiversion;
use rayon::prelude::*;
use sconce_zero::Autocast;

use super::arguments::{expect_axes, expect_like, expect_shape};
use super::cross_entropy::{cross_entropy, targets};
use super::element::{Element, dense, has_kernel, is_on_cpu, with_element};
use super::exponential::exp;
use super::lanes;
use super::linear::Linear;
use super::matrix_product::{Destination, Matrix, multiply_on_all_threads};

const NAME: &str = "linear_cross_entropy";

/// Rows whose logits exist at a time: many enough that products with the weight are efficient.
const LEAST_ROWS: usize = 128;
/// Logits that exist at a time, unless [`LEAST_ROWS`] have more.
const BLOCK_LOGITS: usize = 1 << 20;

/// Returns of how many rows the logits exist at a time.
pub(crate) fn loss_block_rows(vocab: usize) -> usize {
    LEAST_ROWS.max(BLOCK_LOGITS / vocab)
}

/// Averages the negative log-likelihood of the labels under the logits `xs wᵀ`: what [`cross_entropy`] gives for a linear layer's
/// results.
///
/// `xs` has shape `[n, in]`, the layer's weight `[vocab, in]`, `labels` `[n]` and dtype `i64` or `u32`; rows whose label is
/// `ignore_index` do not count. The result is an `f32` scalar (`f64` for `f64`), 0 when no label counts.
///
/// On the CPU in `f32`, `bf16` and `f16` it is one op, and computes in `f32`. It computes the gradients at once, also where no backward
/// follows. A layer with a bias, in fp8, with a weight that is kept in f32 beside narrower inputs, or within
/// [`Autocast`], and other dtypes and devices, take the layer's forward and [`cross_entropy`].
///
/// # Errors
///
/// Fails as the two do.
pub fn linear_cross_entropy(layer: &Linear, xs: &Tensor, labels: &Tensor, ignore_index: i64) -> Result<Tensor> {
    let weight = layer.weight();
    let is_plain = layer.bias().is_none() && layer.fp8().is_none() && Autocast::current().dtype().is_none();
    if is_plain && is_on_cpu(xs) && [xs.dtype(), weight.dtype()] == [DType::F16; 2] {
        let wide = Linear::new(weight.to_dtype(DType::F32)?, None);
        return linear_cross_entropy(&wide, &xs.to_dtype(DType::F32)?, labels, ignore_index);
    }
    if !is_plain || !has_kernel(xs) || xs.dtype() != weight.dtype() {
        return cross_entropy(&layer.forward(xs)?, labels, ignore_index);
    }
    expect_axes(NAME, "xs", xs, &["n", "in"])?;
    let (rows, width) = xs.dims2()?;
    let (vocab, _) = weight.dims2()?;
    expect_shape(NAME, "weight", weight, &[vocab, width])?;
    expect_like(NAME, "xs", xs, "weight", weight)?;
    expect_shape(NAME, "labels", labels, &[rows])?;
    if vocab == 0 || width == 0 {
        bail!("{NAME}: expected a weight with elements, got {:?}", weight.dims());
    }
    let targets = targets(NAME, labels, vocab, ignore_index)?;
    let op = LinearCrossEntropy {
        counted: targets
            .iter()
            .enumerate()
            .filter_map(|(row, target)| Some((row, (*target)?)))
            .collect(),
        wants: [xs.track_op(), weight.track_op()],
        gradients: OnceLock::new(),
    };
    xs.contiguous()?.apply_op2(&weight.contiguous()?, op)
}

struct LinearCrossEntropy {
    /// Rows that count, with their labels.
    counted: Vec<(usize, usize)>,
    /// Whether the gradients of the input and of the weight are wanted.
    wants: [bool; 2],
    /// Those of the loss as it is, in f32: they are rounded once, when the loss's own gradient is known.
    gradients: OnceLock<[Option<Tensor>; 2]>,
}

impl CustomOp2 for LinearCrossEntropy {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        xs: &CpuStorage,
        xs_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (vocab, width) = weight_layout.shape().dims2()?;
        with_element!(xs.dtype(), NAME, T => {
            let xs = dense::<T>(NAME, xs, xs_layout)?;
            let weight = dense::<T>(NAME, weight, weight_layout)?;
            let widened: Vec<f32>;
            let weight = match T::as_f32(weight) {
                Some(weight) => weight,
                None => {
                    widened = weight.par_iter().with_min_len(1 << 14).map(|x| x.widen()).collect();
                    &widened
                }
            };
            let mut pass = Pass {
                weight: Matrix::new(weight, vocab, width),
                scale: 1.0 / self.counted.len().max(1) as f32,
                of_xs: if self.wants[0] { bytemuck::zeroed_vec::<f32>(xs.len()) } else { Vec::new() },
                of_weight: if self.wants[1] { bytemuck::zeroed_vec::<f32>(weight.len()) } else { Vec::new() },
                loss: 0.0,
            };
            for rows in self.counted.chunks(loss_block_rows(vocab)) {
                pass.take(xs, rows, (vocab, width), self.wants);
            }
            let as_tensor = |is_wanted: bool, elements: Vec<f32>, layout: &Layout| {
                is_wanted.then(|| Tensor::from_vec(elements, layout.shape(), &Device::Cpu)).transpose()
            };
            let of_xs = as_tensor(self.wants[0], pass.of_xs, xs_layout)?;
            let of_weight = as_tensor(self.wants[1], pass.of_weight, weight_layout)?;
            self.gradients.get_or_init(|| [of_xs, of_weight]);
            let loss = pass.loss / self.counted.len().max(1) as f64;
            Ok((CpuStorage::F32(vec![loss as f32]), Shape::from(())))
        })
    }

    /// With `p = softmax(x wᵀ)` and `d = (p - onehot(label)) / count` of the rows that count: `dx = d w`, `dw = dᵀ x`.
    fn bwd(
        &self,
        xs: &Tensor,
        _weight: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Some(gradients) = self.gradients.get() else {
            bail!("{NAME}: the backward pass ran before the forward pass");
        };
        let scale = f64::from(gradient.to_scalar::<f32>()?);
        let scaled = |gradient: &Option<Tensor>| {
            let Some(gradient) = gradient else { return Ok(None) };
            let gradient = if scale == 1.0 {
                gradient.clone()
            } else {
                gradient.affine(scale, 0.0)?
            };
            gradient.to_dtype(xs.dtype()).map(Some)
        };
        Ok((scaled(&gradients[0])?, scaled(&gradients[1])?))
    }
}

/// One forward pass, and what has come of it so far.
struct Pass<'a> {
    weight: Matrix<'a>,
    /// What a row's loss counts in the mean.
    scale: f32,
    of_xs: Vec<f32>,
    of_weight: Vec<f32>,
    /// The sum over rows.
    loss: f64,
}

impl Pass<'_> {
    /// Adds the loss of a block of rows, and their part of the gradients.
    fn take<T: Element>(
        &mut self,
        xs: &[T],
        rows: &[(usize, usize)],
        (vocab, width): (usize, usize),
        wants: [bool; 2],
    ) {
        let count = rows.len();
        let mut block = Vec::with_capacity(count * width);
        for (row, _) in rows {
            block.extend(xs[row * width..][..width].iter().map(|x| x.widen()));
        }
        let block = Matrix::new(&block, count, width);
        let mut logits = vec![0f32; count * vocab];
        multiply_on_all_threads(block, self.weight.transposed(), Destination::Overwrite, &mut logits);

        let is_trained = wants[0] || wants[1];
        let scale = is_trained.then_some(self.scale);
        let mut losses = vec![0f64; count];
        (logits.par_chunks_exact_mut(vocab), rows, &mut losses)
            .into_par_iter()
            .for_each(|(logits, (_, target), loss)| *loss = take_row(logits, *target, scale));
        self.loss += losses.iter().sum::<f64>();

        let of_logits = Matrix::new(&logits, count, vocab);
        if wants[0] {
            let mut of_block = vec![0f32; count * width];
            multiply_on_all_threads(of_logits, self.weight, Destination::Overwrite, &mut of_block);
            for ((row, _), gradient) in rows.iter().zip(of_block.chunks_exact(width)) {
                self.of_xs[row * width..][..width].copy_from_slice(gradient);
            }
        }
        if wants[1] {
            multiply_on_all_threads(of_logits.transposed(), block, Destination::Add, &mut self.of_weight);
        }
    }
}

/// Returns the loss of a row, and puts its gradient times `scale`, if there is one, in the place of the logits.
#[multiversion(targets = "simd")]
fn take_row(logits: &mut [f32], target: usize, scale: Option<f32>) -> f64 {
    let maximum = lanes::maximum(logits);
    let logit = logits[target];
    let sum = match scale {
        None => lanes::sum(logits, |x| exp(x - maximum)),
        Some(_) => {
            logits.iter_mut().for_each(|x| *x = exp(*x - maximum));
            lanes::sum(logits, |x| x)
        }
    };
    if let Some(scale) = scale {
        let probability = logits[target] / sum;
        let factor = scale / sum;
        logits.iter_mut().for_each(|x| *x *= factor);
        logits[target] = (probability - 1.0) * scale;
    }
    f64::from(maximum) + f64::from(sum).ln() - f64::from(logit)
}
