//! The gated activation of Llama's feed-forward block as one op: composed of candle ops it makes
//! two passes forward and more than fifteen backward.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use multiversion::multiversion;

use super::arguments::{expect_float, expect_like, expect_shape};
use super::element::{CpuTensor, Element, composition_dtype, dense, has_kernel, tensor_like, with_element};
use super::exponential::sigmoid;
use super::row_blocks;

const NAME: &str = "swiglu";

/// Gates `up` by `gate`: `silu(gate) · up` with `silu(x) = x / (1 + e^-x)` (Shazeer, 2020,
/// arXiv:2002.05202).
///
/// Both have the same shape and floating-point dtype, and so has the result.
///
/// # Errors
///
/// Fails when shapes, dtypes or devices differ, or when they hold integers.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    expect_float(NAME, "gate", gate)?;
    expect_shape(NAME, "up", up, gate.dims())?;
    expect_like(NAME, "up", up, "gate", gate)?;
    if has_kernel(gate) {
        gate.contiguous()?.apply_op2(&up.contiguous()?, Swiglu)
    } else {
        compose(gate, up)
    }
}

fn compose(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let dtype = composition_dtype(gate.dtype());
    (gate.to_dtype(dtype)?.silu()? * up.to_dtype(dtype)?)?.to_dtype(gate.dtype())
}

struct Swiglu;

impl CustomOp2 for Swiglu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        with_element!(gate.dtype(), NAME, T => {
            let gate = dense::<T>(NAME, gate, layout)?;
            let up = dense::<T>(NAME, up, up_layout)?;
            let mut out = bytemuck::zeroed_vec::<T>(gate.len());
            let block = row_blocks::independent(1);
            row_blocks::for_each(&mut out, block, |index, out| {
                let range = index * block..index * block + out.len();
                forward_block(&gate[range.clone()], &up[range], out);
            });
            Ok((T::store(out), layout.shape().clone()))
        })
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _result: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let gradient = gradient.contiguous()?;
        let gate_lock = CpuTensor::lock(NAME, gate);
        let up_lock = CpuTensor::lock(NAME, up);
        let gradient = CpuTensor::lock(NAME, &gradient);
        with_element!(gate.dtype(), NAME, T => {
            let (a, b, g) = (gate_lock.elements::<T>()?, up_lock.elements::<T>()?, gradient.elements::<T>()?);
            let mut d_gate = bytemuck::zeroed_vec::<T>(a.len());
            let mut d_up = bytemuck::zeroed_vec::<T>(a.len());
            let block = row_blocks::independent(1);
            row_blocks::for_each_pair((&mut d_gate, block), (&mut d_up, block), |index, d_gate, d_up| {
                let range = index * block..index * block + d_gate.len();
                backward_block(&a[range.clone()], &b[range.clone()], &g[range], d_gate, d_up);
            });
            Ok((
                gate.track_op().then(|| tensor_like(d_gate, gate)).transpose()?,
                up.track_op().then(|| tensor_like(d_up, up)).transpose()?,
            ))
        })
    }
}

#[multiversion(targets = "simd")]
fn forward_block<T: Element>(gate: &[T], up: &[T], out: &mut [T]) {
    for ((out, &a), &b) in out.iter_mut().zip(gate).zip(up) {
        *out = T::round(a.widen() * sigmoid(a.widen()) * b.widen());
    }
}

/// With `s` the sigmoid of the gate `a`: `d silu(a) / da = s (1 + a (1 - s))`.
#[multiversion(targets = "simd")]
fn backward_block<T: Element>(gate: &[T], up: &[T], gradient: &[T], d_gate: &mut [T], d_up: &mut [T]) {
    let inputs = gate.iter().zip(up).zip(gradient);
    for ((d_gate, d_up), ((&a, &b), &g)) in d_gate.iter_mut().zip(d_up.iter_mut()).zip(inputs) {
        let (a, b, g) = (a.widen(), b.widen(), g.widen());
        let s = sigmoid(a);
        *d_gate = T::round(g * b * s * (1.0 + a * (1.0 - s)));
        *d_up = T::round(g * a * s);
    }
}
