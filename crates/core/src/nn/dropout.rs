//! Dropout whose masks come again: candle's cannot be seeded, so that neither a run nor an activation that
//! is recomputed can be repeated, and it keeps a mask of the input's size until the backward pass.

use bytemuck::Zeroable;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, DType, Device, Error, Layout, ModuleT, Result, Shape, Tensor, WithDType, bail,
};
use half::{bf16, f16};
use multiversion::multiversion;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use sconce_zero::RandomState;

use super::arguments::expect_float;
use super::element::{Element, is_on_cpu};
use super::row_blocks;

const NAME: &str = "dropout";

/// Drops each element with probability `p` in training and divides the others by `1 - p`; else changes
/// nothing (Srivastava et al. 2014, JMLR 15:1929-1958).
///
/// The input has any shape and a floating-point dtype, and so has the output: it is the input times a mask
/// of `0` and `1 / (1 - p)`. A call draws one key from the rank's [`RandomState`]; the mask is made from the
/// key, in the backward pass again. An element's place in the mask depends on its index alone.
#[derive(Debug, Clone)]
pub struct Dropout {
    p: f32,
}

impl Dropout {
    /// Creates the layer from the probability of dropping an element.
    pub fn new(p: f32) -> Self {
        Self { p }
    }

    /// Drops elements if `train`.
    ///
    /// # Errors
    ///
    /// Fails in training, when `p` is not in `0..1` or `xs` does not hold floating-point numbers.
    pub fn forward(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        if !train {
            return Ok(xs.clone());
        }
        if !(0. ..1.).contains(&self.p) {
            bail!("{NAME}: dropout probability has to be in [0, 1), got {}", self.p);
        }
        expect_float(NAME, "xs", xs)?;
        if self.p == 0. {
            return Ok(xs.clone());
        }
        let mask = Mask {
            key: RandomState::draw_key(),
            dropped_below: (f64::from(self.p) * 2f64.powi(32)) as u32,
            scale: 1. / (1. - f64::from(self.p)),
        };
        if is_on_cpu(xs) {
            return xs.contiguous()?.apply_op1(mask);
        }
        let ones = Tensor::ones(xs.shape(), xs.dtype(), &Device::Cpu)?;
        xs * ones.apply_op1_no_bwd(&mask)?.to_device(xs.device())?
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(xs, train)
    }
}

/// Multiplication by a random mask.
struct Mask {
    key: u64,
    /// An element is dropped if its random word is less.
    dropped_below: u32,
    scale: f64,
}

impl Mask {
    fn apply<T: Scalable>(&self, xs: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            return Err(Error::RequiresContiguous { op: NAME }.bt());
        };
        let xs = &T::cpu_storage_as_slice(xs)?[start..end];
        let mut out = bytemuck::zeroed_vec::<T>(xs.len());
        let block = row_blocks::independent(1);
        row_blocks::for_each(&mut out, block, |index, out| {
            let first = index * block;
            // Word i of the key's stream is element i's.
            let mut words = ChaCha8Rng::seed_from_u64(self.key);
            words.set_word_pos(first as u128);
            let mut drawn = [0u32; 1024];
            for (xs, out) in xs[first..].chunks(drawn.len()).zip(out.chunks_mut(drawn.len())) {
                words.fill_bytes(bytemuck::cast_slice_mut(&mut drawn[..out.len()]));
                multiply(xs, &drawn, self.dropped_below, T::factor(self.scale), out);
            }
        });
        Ok(T::to_cpu_storage_owned(out))
    }
}

impl CustomOp1 for Mask {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, xs: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = match xs.dtype() {
            DType::F32 => self.apply::<f32>(xs, layout),
            DType::F64 => self.apply::<f64>(xs, layout),
            DType::BF16 => self.apply::<bf16>(xs, layout),
            DType::F16 => self.apply::<f16>(xs, layout),
            dtype => Err(Error::UnsupportedDTypeForOp(dtype, NAME).bt()),
        };
        Ok((out?, layout.shape().clone()))
    }

    fn bwd(&self, _xs: &Tensor, _result: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        gradient.contiguous()?.apply_op1_no_bwd(self).map(Some)
    }
}

#[multiversion(targets = "simd")]
fn multiply<T: Scalable>(xs: &[T], drawn: &[u32], dropped_below: u32, scale: T::Factor, out: &mut [T]) {
    let none = T::Factor::default();
    for ((out, &x), &word) in out.iter_mut().zip(xs).zip(drawn) {
        *out = x.times(if word < dropped_below { none } else { scale });
    }
}

/// An element that is multiplied in a type of at least `f32`'s precision, and rounded once.
trait Scalable: WithDType + Zeroable + Send + Sync {
    type Factor: Copy + Default + Send + Sync;

    fn factor(value: f64) -> Self::Factor;

    fn times(self, factor: Self::Factor) -> Self;
}

impl Scalable for f64 {
    type Factor = Self;

    fn factor(value: f64) -> Self::Factor {
        value
    }

    #[inline(always)]
    fn times(self, factor: Self::Factor) -> Self {
        self * factor
    }
}

macro_rules! scaled_in_f32 {
    ($element:ty, $widen:expr, $round:expr) => {
        impl Scalable for $element {
            type Factor = f32;

            fn factor(value: f64) -> Self::Factor {
                value as f32
            }

            #[inline(always)]
            fn times(self, factor: Self::Factor) -> Self {
                $round($widen(self) * factor)
            }
        }
    };
}

scaled_in_f32!(f32, Element::widen, <Self as Element>::round);
scaled_in_f32!(bf16, Element::widen, <Self as Element>::round);
scaled_in_f32!(f16, f16::to_f32, f16::from_f32);
