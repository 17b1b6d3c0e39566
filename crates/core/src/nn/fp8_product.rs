//! The product of a linear layer over values of fp8, emulated: values are rounded to the fp8 grid and multiplied as f32.

use std::sync::{Arc, OnceLock};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, D, DType, Device, Layout, Result, Shape, Tensor, WithDType};

use super::element::CpuTensor;
use crate::fp8::{Fp8Layer, Quantity, Rounded};

const NAME: &str = "linear in fp8";

/// Multiplies rows by the transpose of a weight of shape `[out, in]`: `xs` of shape `[.., in]` gives `[.., out]` in its dtype.
///
/// With `q` rounding to the grid after a multiplication by the scale `s`: `y = q(x) q(w)ᵀ / (s_x s_w)`, and in the backward
/// `dx = q(g) q(w) / (s_g s_w)` and `dw = q(g)ᵀ q(x) / (s_g s_x)`, with the scales of the forward for input and weight. They
/// are rounded anew there, to the same values, so that nothing but two numbers is kept for it.
pub(super) fn fp8_product(xs: &Tensor, weight: &Tensor, layer: &Arc<Fp8Layer>) -> Result<Tensor> {
    let mut dims = xs.dims().to_vec();
    dims.pop();
    dims.push(weight.dim(0)?);
    let product = xs.flatten_to(D::Minus2)?.apply_op2(
        weight,
        Fp8Product {
            layer: Arc::clone(layer),
            is_differentiated: xs.track_op() || weight.track_op(),
            rounded: OnceLock::new(),
        },
    )?;
    product.reshape(dims)
}

struct Fp8Product {
    layer: Arc<Fp8Layer>,
    is_differentiated: bool,
    /// How input and weight were rounded in the forward.
    rounded: OnceLock<[Rounded; 2]>,
}

impl CustomOp2 for Fp8Product {
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
        let (rows, width) = xs_layout.shape().dims2()?;
        let height = weight_layout.shape().dims2()?.0;
        let (mut inputs, mut weights) = (wide(xs, xs_layout)?, wide(weight, weight_layout)?);
        let rounded = [
            self.layer.input.round(&mut inputs),
            self.layer.weight.round(&mut weights),
        ];
        if !self.is_differentiated {
            self.record(rounded);
        }
        self.rounded.get_or_init(|| rounded);
        let columns = Layout::contiguous((height, width)).transpose(0, 1)?;
        let product = CpuStorage::F32(inputs).matmul(
            &CpuStorage::F32(weights),
            (1, rows, height, width),
            &Layout::contiguous((rows, width)),
            &columns,
        )?;
        let shape = Shape::from((rows, height));
        let layout = Layout::contiguous(&shape);
        let scaled = product.affine(&layout, unscale(rounded[0].scale, rounded[1].scale), 0.0)?;
        Ok((scaled.to_dtype(&layout, xs.dtype())?, shape))
    }

    fn bwd(
        &self,
        xs: &Tensor,
        weight: &Tensor,
        _product: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Some(rounded) = self.rounded.get() else {
            candle_core::bail!("{NAME}: the backward comes before the forward");
        };
        self.record(*rounded);
        let mut values = wide_of(gradient)?;
        let rounded_gradient = self.layer.gradient.round(&mut values);
        self.layer.gradient.record(rounded_gradient.amax);
        let gradient = Tensor::from_vec(values, gradient.shape(), &Device::Cpu)?;
        let again = |tensor: &Tensor, quantity: &Quantity, scale: f32| {
            let mut values = wide_of(tensor)?;
            quantity.round_with(&mut values, scale);
            Tensor::from_vec(values, tensor.shape(), &Device::Cpu)
        };
        let back = |product: Tensor, scale: f32, dtype: DType| {
            product
                .affine(unscale(rounded_gradient.scale, scale), 0.0)?
                .to_dtype(dtype)
        };
        let [input, of_weight] = rounded.map(|rounded| rounded.scale);
        let of_xs = xs.track_op().then(|| {
            let product = gradient.matmul(&again(weight, &self.layer.weight, of_weight)?)?;
            back(product, of_weight, xs.dtype())
        });
        let of_weight = weight.track_op().then(|| {
            let product = gradient.t()?.matmul(&again(xs, &self.layer.input, input)?)?;
            back(product, input, weight.dtype())
        });
        Ok((of_xs.transpose()?, of_weight.transpose()?))
    }
}

impl Fp8Product {
    fn record(&self, [input, weight]: [Rounded; 2]) {
        self.layer.input.record(input.amax);
        self.layer.weight.record(weight.amax);
    }
}

/// Returns what undoes two scales. Each is inverted on its own: their product may be beyond f32.
fn unscale(a: f32, b: f32) -> f64 {
    f64::from(a).recip() * f64::from(b).recip()
}

fn wide_of(tensor: &Tensor) -> Result<Vec<f32>> {
    let lock = CpuTensor::lock(NAME, tensor);
    let (storage, layout) = lock.parts()?;
    wide(storage, layout)
}

/// Returns a copy of the elements in order, as f32.
fn wide(storage: &CpuStorage, layout: &Layout) -> Result<Vec<f32>> {
    let elements = storage.to_dtype(layout, DType::F32)?;
    match elements {
        CpuStorage::F32(values) => Ok(values),
        other => Ok(f32::cpu_storage_as_slice(&other)?.to_vec()),
    }
}
