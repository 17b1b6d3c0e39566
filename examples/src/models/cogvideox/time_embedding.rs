//! The embedding of a number, such as the time step: sinusoids, then two linear layers.

use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use sconce_core::nn::{Linear, linear};

use super::CogVideoXConfig;

/// diffusers' `Timesteps` and `TimestepEmbedding`.
#[derive(Debug)]
pub(super) struct TimeEmbedding {
    linear_1: Linear,
    linear_2: Linear,
    /// Rates of the sinusoids, in f32.
    rates: Tensor,
    cosines_first: bool,
}

impl TimeEmbedding {
    /// Makes `width` sinusoids (Vaswani et al. 2017, arXiv:1706.03762) into an embedding of width `output`.
    pub(super) fn new(width: usize, output: usize, config: &CogVideoXConfig, vb: VarBuilder) -> Result<Self> {
        let half = width / 2;
        let rate = |i: usize| (-(10_000f64.ln()) * i as f64 / (half as f64 - config.freq_shift)).exp() as f32;
        let rates = Vec::from_iter((0..half).map(rate));
        Ok(Self {
            linear_1: linear(width, output, vb.pp("linear_1"))?,
            linear_2: linear(output, output, vb.pp("linear_2"))?,
            rates: Tensor::from_vec(rates, (1, half), &Device::Cpu)?.to_device(vb.device())?,
            cosines_first: config.flip_sin_to_cos,
        })
    }

    /// Embeds numbers of shape \[batch\] as [batch, output] in the given dtype. The angles are in f32 whatever the dtype, as in
    /// diffusers: a time step of 999 has no neighbours in bf16.
    pub(super) fn forward(&self, numbers: &Tensor, dtype: DType) -> Result<Tensor> {
        let angles = numbers.to_dtype(DType::F32)?.unsqueeze(1)?.broadcast_mul(&self.rates)?;
        let (sines, cosines) = (angles.sin()?, angles.cos()?);
        let waves = match self.cosines_first {
            true => [cosines, sines],
            false => [sines, cosines],
        };
        let waves = Tensor::cat(&waves, D::Minus1)?.to_dtype(dtype)?;
        self.linear_2.forward(&self.linear_1.forward(&waves)?.silu()?)
    }
}
