//! Rotary position embedding with a backward: every `candle_nn::rotary_emb::rope*` cuts the autograd
//! graph (huggingface/candle #3011).

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, D, DType, Device, Layout, Result, Shape, Tensor, bail};
use multiversion::multiversion;

use super::arguments::{expect_axes, expect_float, expect_shape};
use super::element::{CpuTensor, Element, composition_dtype, has_kernel, tensor_like, with_element};
use super::heads::{Heads, with_adjacent_elements};
use super::row_blocks;

const NAME: &str = "rotary_embedding";

/// Rotates pairs of elements of queries and keys by angles that grow with the position (Su et al.,
/// 2021, arXiv:2104.09864), in the pairing of Hugging Face's Llama: element `i` with element
/// `i + head_dim / 2`; or, [where that is asked for](Self::of_neighbours), in the paper's.
#[derive(Debug, Clone)]
pub struct RotaryEmbedding {
    cos: Tensor,
    sin: Tensor,
    pairing: Pairing,
}

/// Which elements of a row turn together as pair `i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pairing {
    /// `i` and `i + head_dim / 2`.
    Halves,
    /// `2 i` and `2 i + 1`.
    Neighbours,
}

impl RotaryEmbedding {
    /// Creates the tables for positions `0..max_positions`: position `p` turns pair `i` by
    /// `p · theta^(-2i / head_dim)`.
    ///
    /// `dtype` is that of the queries and keys. Tables are kept in `f32` (`f64` for `f64`), whatever the
    /// dtype: a bf16 result is then rounded once, not also in its angles.
    ///
    /// # Errors
    ///
    /// Fails when `head_dim` is odd or `dtype` is not a floating-point dtype.
    pub fn new(head_dim: usize, max_positions: usize, theta: f64, dtype: DType, device: &Device) -> Result<Self> {
        if !head_dim.is_multiple_of(2) {
            bail!("{NAME}: expected an even head_dim, got {head_dim}");
        }
        if !dtype.is_float() {
            bail!("{NAME}: expected a floating-point dtype, got {dtype:?}");
        }
        let half = head_dim / 2;
        let angles: Vec<f64> = (0..max_positions)
            .flat_map(|position| {
                (0..half).map(move |pair| position as f64 * theta.powf(-2.0 * pair as f64 / head_dim as f64))
            })
            .collect();
        let table = |function: fn(f64) -> f64| {
            let values: Vec<f64> = angles.iter().map(|&angle| function(angle)).collect();
            Tensor::from_vec(values, (max_positions, half), &Device::Cpu)?
                .to_dtype(composition_dtype(dtype))?
                .to_device(device)
        };
        Ok(Self {
            cos: table(f64::cos)?,
            sin: table(f64::sin)?,
            pairing: Pairing::Halves,
        })
    }

    /// Creates the embedding from tables of shape `[max_positions, head_dim / 2]`, for frequencies that
    /// are scaled in some other way. The tables are constants: no gradient flows into them.
    ///
    /// # Errors
    ///
    /// Fails when the tables' shapes differ or they are not floating-point matrices.
    pub fn from_tables(cos: Tensor, sin: Tensor) -> Result<Self> {
        expect_float(NAME, "cos", &cos)?;
        expect_float(NAME, "sin", &sin)?;
        expect_axes(NAME, "cos", &cos, &["max_positions", "head_dim / 2"])?;
        expect_shape(NAME, "sin", &sin, cos.dims())?;
        let constant = |table: Tensor| table.detach().to_dtype(composition_dtype(table.dtype()))?.contiguous();
        Ok(Self {
            cos: constant(cos)?,
            sin: constant(sin)?,
            pairing: Pairing::Halves,
        })
    }

    /// Returns an embedding of the same angles that turns element `2 i` with element `2 i + 1` as pair `i`, as in diffusers'
    /// `apply_rotary_emb` and in GPT-J.
    #[must_use]
    pub fn of_neighbours(self) -> Self {
        Self {
            pairing: Pairing::Neighbours,
            ..self
        }
    }

    /// Returns the number of positions the tables hold.
    pub fn max_positions(&self) -> usize {
        self.cos.dims()[0]
    }

    /// Rotates `xs`, of shape `[batch, heads, sequence, head_dim]`, whose first row has position
    /// `start`. The result has the same shape and dtype; `xs` may be a transposed view.
    ///
    /// # Errors
    ///
    /// Fails when `xs` has another rank or head size, holds integers, lies on another device than the
    /// tables, or reaches past their last position.
    pub fn apply(&self, xs: &Tensor, start: usize) -> Result<Tensor> {
        expect_float(NAME, "xs", xs)?;
        expect_axes(NAME, "xs", xs, &["batch", "heads", "sequence", "head_dim"])?;
        let (max_positions, half) = self.cos.dims2()?;
        let (_, _, sequence, head_dim) = xs.dims4()?;
        if head_dim != 2 * half {
            bail!("{NAME}: expected xs with head_dim {}, got {:?}", 2 * half, xs.dims());
        }
        if start.saturating_add(sequence) > max_positions {
            bail!(
                "{NAME}: expected positions below {max_positions}, got {start}..{} for xs {:?}; \
                 raise max_positions",
                start.saturating_add(sequence),
                xs.dims()
            );
        }
        if !xs.device().same_device(self.cos.device()) {
            bail!(
                "{NAME}: expected xs on the device of the tables, {:?}, got {:?}",
                self.cos.device().location(),
                xs.device().location()
            );
        }
        if has_kernel(xs) {
            with_adjacent_elements(xs)?.apply_op1(Rotation {
                cos: self.cos.narrow(0, start, sequence)?.to_dtype(DType::F32)?,
                sin: self.sin.narrow(0, start, sequence)?.to_dtype(DType::F32)?,
                pairing: self.pairing,
            })
        } else {
            self.compose(xs, start)
        }
    }

    fn compose(&self, xs: &Tensor, start: usize) -> Result<Tensor> {
        let (batch, heads, sequence, head_dim) = xs.dims4()?;
        let half = head_dim / 2;
        let dtype = composition_dtype(xs.dtype());
        let cos = self.cos.narrow(0, start, sequence)?.to_dtype(dtype)?;
        let sin = self.sin.narrow(0, start, sequence)?.to_dtype(dtype)?;
        let wide = xs.to_dtype(dtype)?;
        let (low, high) = match self.pairing {
            Pairing::Halves => (wide.narrow(D::Minus1, 0, half)?, wide.narrow(D::Minus1, half, half)?),
            Pairing::Neighbours => {
                let pairs = wide.reshape((batch, heads, sequence, half, 2))?;
                (pairs.get_on_dim(4, 0)?, pairs.get_on_dim(4, 1)?)
            }
        };
        let turned_low = (low.broadcast_mul(&cos)? - high.broadcast_mul(&sin)?)?;
        let turned_high = (high.broadcast_mul(&cos)? + low.broadcast_mul(&sin)?)?;
        let turned = match self.pairing {
            Pairing::Halves => Tensor::cat(&[turned_low, turned_high], D::Minus1)?,
            Pairing::Neighbours => Tensor::stack(&[turned_low, turned_high], 4)?.reshape(xs.shape())?,
        };
        turned.to_dtype(xs.dtype())
    }
}

/// The rotation by the angles of one stretch of positions, of shape `[sequence, head_dim / 2]`.
struct Rotation {
    cos: Tensor,
    sin: Tensor,
    pairing: Pairing,
}

impl Rotation {
    /// Turns every row forwards (`direction` 1) or backwards (-1).
    fn turn<T: Element>(&self, xs: Heads<T>, planes: usize, direction: f32) -> Result<Vec<T>> {
        let (cos, sin) = (CpuTensor::lock(NAME, &self.cos), CpuTensor::lock(NAME, &self.sin));
        let (cos, sin) = (cos.elements::<f32>()?, sin.elements::<f32>()?);
        let plane_elements = xs.sequence * xs.size;
        let mut out = bytemuck::zeroed_vec::<T>(planes * plane_elements);
        if plane_elements == 0 {
            return Ok(out);
        }
        let block = plane_elements * row_blocks::independent(plane_elements);
        row_blocks::for_each(&mut out, block, |index, out| {
            let first_plane = index * block / plane_elements;
            for (offset, out) in out.chunks_exact_mut(plane_elements).enumerate() {
                let plane = xs.plane(first_plane + offset);
                let turn = match self.pairing {
                    Pairing::Halves => turn_halves,
                    Pairing::Neighbours => turn_neighbours,
                };
                turn(plane, xs.row_stride(), (cos, sin), direction, out, xs.size);
            }
        });
        Ok(out)
    }
}

impl CustomOp1 for Rotation {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (batch, heads, _, _) = layout.shape().dims4()?;
        with_element!(storage.dtype(), NAME, T => {
            let out = self.turn(Heads::<T>::new(NAME, storage, layout)?, batch * heads, 1.0)?;
            Ok((T::store(out), layout.shape().clone()))
        })
    }

    /// A rotation's transpose is the rotation back.
    fn bwd(&self, xs: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let (batch, heads, _, _) = xs.dims4()?;
        let gradient = with_adjacent_elements(gradient)?;
        let gradient = CpuTensor::lock(NAME, &gradient);
        with_element!(xs.dtype(), NAME, T => {
            let out = self.turn(Heads::<T>::of(NAME, &gradient)?, batch * heads, -1.0)?;
            tensor_like(out, xs).map(Some)
        })
    }
}

#[multiversion(targets = "simd")]
fn turn_halves<T: Element>(
    xs: &[T],
    stride: usize,
    (cos, sin): (&[f32], &[f32]),
    direction: f32,
    out: &mut [T],
    size: usize,
) {
    let half = size / 2;
    let angles = cos.chunks_exact(half).zip(sin.chunks_exact(half));
    for (row, (out, (cos, sin))) in out.chunks_exact_mut(size).zip(angles).enumerate() {
        let (low, high) = xs[row * stride..][..size].split_at(half);
        let (out_low, out_high) = out.split_at_mut(half);
        let inputs = low.iter().zip(high).zip(cos.iter().zip(sin));
        for ((out_low, out_high), ((&low, &high), (&cos, &sin))) in out_low.iter_mut().zip(out_high).zip(inputs) {
            let sin = direction * sin;
            *out_low = T::round(low.widen() * cos - high.widen() * sin);
            *out_high = T::round(high.widen() * cos + low.widen() * sin);
        }
    }
}

#[multiversion(targets = "simd")]
fn turn_neighbours<T: Element>(
    xs: &[T],
    stride: usize,
    (cos, sin): (&[f32], &[f32]),
    direction: f32,
    out: &mut [T],
    size: usize,
) {
    let half = size / 2;
    let angles = cos.chunks_exact(half).zip(sin.chunks_exact(half));
    for (row, (out, (cos, sin))) in out.chunks_exact_mut(size).zip(angles).enumerate() {
        let (pairs, _) = xs[row * stride..][..size].as_chunks::<2>();
        let (out_pairs, _) = out.as_chunks_mut::<2>();
        for ((out, &[first, second]), (&cos, &sin)) in out_pairs.iter_mut().zip(pairs).zip(cos.iter().zip(sin)) {
            let sin = direction * sin;
            *out = [
                T::round(first.widen() * cos - second.widen() * sin),
                T::round(second.widen() * cos + first.widen() * sin),
            ];
        }
    }
}
