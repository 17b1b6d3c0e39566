//! The linear layer with a backward of its own on the CPU. Candle computes and keeps the gradients of both sides of a product or
//! a sum, whether anybody wants them or not: a frozen weight costs a third of the layer's arithmetic, and memory of its own
//! size, for nothing. And it computes the gradient of a weight's transpose, whose transpose it then adds to zeros element by
//! element.

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::op::Add;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, D, DType, Layout, Module, Result, Shape, Tensor, bail};
use candle_nn::VarBuilder;
use sconce_zero::Autocast;

use super::arguments::{computed_in, expect_like, expect_shape, is_kept_in_f32, last_dimension};
use super::element::{CpuTensor, is_on_cpu};
use super::fp8_product::fp8_product;
use crate::fp8::{self, Fp8Layer};

const NAME: &str = "linear";

/// Multiplies rows by a weight and adds a bias: `y = x wᵀ + b`.
///
/// The input has shape `[.., in]` with two to four dimensions, the weight `[out, in]`, the bias `[out]`;
/// the output has shape `[.., out]`. All have one dtype, but a weight that is kept in f32 takes 16 bits and gives them.
///
/// Parameters, results and gradients are those of `candle_nn::Linear` on a contiguous input, to the bit; on a
/// transposed view of more than two dimensions that layer is wrong, and this one copies. On the CPU, gradients of
/// parameters that are not tracked (frozen ones) are not computed: with `g` the output's gradient, what is
/// left of the backward pass is `dx = g w`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    /// The scales of its products in fp8, if it computes them so.
    fp8: Option<Arc<Fp8Layer>>,
}

/// Creates a [`Linear`] from the parameters `weight` and `bias`, initialised as `candle_nn::linear` does.
///
/// # Errors
///
/// Fails when `vb` has no such parameters of shapes `[out_dim, in_dim]` and `[out_dim]`.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    linear_b(in_dim, out_dim, true, vb)
}

/// Creates a [`Linear`] without bias.
///
/// # Errors
///
/// As [`linear`].
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    linear_b(in_dim, out_dim, false, vb)
}

/// Creates a [`Linear`] with or without bias.
///
/// # Errors
///
/// As [`linear`].
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    let layer = candle_nn::linear_b(in_dim, out_dim, bias, vb.clone())?;
    let is_kept = vb.dtype() != layer.weight().dtype();
    Ok(Linear {
        fp8: if is_kept {
            None
        } else {
            fp8::layer_of(&vb, &[out_dim, in_dim])
        },
        ..Linear::new(layer.weight().clone(), layer.bias().cloned())
    })
}

impl Linear {
    /// Creates the layer from a weight of shape `[out, in]` and a bias of shape `[out]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self {
            weight,
            bias,
            fp8: None,
        }
    }

    /// Returns the weight, of shape `[out, in]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias, of shape `[out]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns the scales of the layer's products in fp8, if it computes them so.
    pub fn fp8(&self) -> Option<&Arc<Fp8Layer>> {
        self.fp8.as_ref()
    }

    /// Computes `product` from input and parameters in a narrower dtype, and widens the result.
    fn cast(&self, dtype: DType, xs: &Tensor) -> Result<Tensor> {
        let narrow = Self {
            weight: self.weight.to_dtype(dtype)?,
            bias: self.bias.as_ref().map(|bias| bias.to_dtype(dtype)).transpose()?,
            fp8: None,
        };
        Autocast::off().during(|| computed_in(dtype, xs, |xs| narrow.forward(xs)))
    }

    fn check(&self, xs: &Tensor) -> Result<()> {
        if !(2..=4).contains(&xs.rank()) {
            bail!("{NAME}: expected xs with two to four dimensions, got {:?}", xs.dims());
        }
        let width = last_dimension(NAME, "xs", xs)?;
        let height = self.weight.dim(0)?;
        expect_shape(NAME, "weight", &self.weight, &[height, width])?;
        expect_like(NAME, "xs", xs, "weight", &self.weight)?;
        if let Some(bias) = &self.bias {
            expect_shape(NAME, "bias", bias, &[height])?;
            expect_like(NAME, "bias", bias, "weight", &self.weight)?;
        }
        Ok(())
    }
}

impl Module for Linear {
    /// # Errors
    ///
    /// Fails when `xs` does not have the shape `[.., in]`, the dtype or the device of the weight.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        if is_kept_in_f32(&self.weight, xs) {
            return computed_in(DType::F32, xs, |xs| Autocast::off().during(|| self.forward(xs)));
        }
        self.check(xs)?;
        if let Some(dtype) = Autocast::current().dtype()
            && self.fp8.is_none()
            && xs.dtype() == DType::F32
        {
            return self.cast(dtype, xs);
        }
        // Candle multiplies the batches of a view by a broadcast weight, and where the view is transposed, all but the
        // first wrongly (huggingface/candle #3758).
        let xs = if xs.rank() > 2 { &xs.contiguous()? } else { xs };
        let is_frozen = |parameter: &Tensor| is_on_cpu(xs) && !parameter.track_op();
        // Candle's products of nothing are zeros.
        let is_empty = xs.elem_count() == 0 || self.weight.elem_count() == 0;
        let product = if let Some(layer) = self.fp8.as_ref().filter(|_| !is_empty) {
            fp8_product(xs, &self.weight, layer)?
        } else if is_on_cpu(xs) && !is_empty {
            xs.apply_op2(&self.weight, Product)?
        } else {
            candle_nn::Linear::new(self.weight.clone(), None).forward(xs)?
        };
        match &self.bias {
            Some(bias) if is_frozen(bias) => product.apply_op1(FrozenSum(bias.clone())),
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }
}

/// Multiplication by the transpose of a weight, of all rows at once.
struct Product;

impl CustomOp2 for Product {
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
        let (height, width) = weight_layout.shape().dims2()?;
        let rows = layout.shape().elem_count() / width;
        let row_layout = match layout.contiguous_offsets() {
            Some((start, _)) => Layout::contiguous_with_offset((rows, width), start),
            // Of two dimensions.
            None => layout.clone(),
        };
        let columns = weight_layout.transpose(0, 1)?;
        let product = xs.matmul(weight, (1, rows, height, width), &row_layout, &columns)?;
        let mut dims = layout.dims().to_vec();
        dims.pop();
        dims.push(height);
        Ok((product, Shape::from(dims)))
    }

    /// `dx = g w` and `dw = gᵀ x`, over all rows; what is not tracked gets none.
    fn bwd(
        &self,
        xs: &Tensor,
        weight: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.flatten_to(D::Minus2)?;
        let of_xs = || gradient.matmul(weight)?.reshape(xs.shape());
        let of_weight = || gradient.t()?.matmul(&xs.flatten_to(D::Minus2)?);
        Ok((
            xs.track_op().then(of_xs).transpose()?,
            weight.track_op().then(of_weight).transpose()?,
        ))
    }
}

/// Addition of a bias that gets no gradient.
struct FrozenSum(Tensor);

impl CustomOp1 for FrozenSum {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, xs: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let lock = CpuTensor::lock(NAME, &self.0);
        let (bias, bias_layout) = lock.parts()?;
        let sum = xs.binary_impl::<Add>(bias, layout, &bias_layout.broadcast_as(layout.shape())?)?;
        Ok((sum, layout.shape().clone()))
    }

    fn bwd(&self, _xs: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(gradient.clone()))
    }
}
