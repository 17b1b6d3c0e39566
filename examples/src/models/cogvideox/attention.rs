//! Attention of text and video to both.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use sconce_core::nn::{LayerNorm, RotaryEmbedding, attention, layer_norm};

use super::projection::Projection;
use super::{Adapters, CogVideoXConfig};

/// diffusers' constant for the norms of queries and keys.
const HEAD_NORM_EPS: f64 = 1e-6;

/// Full attention over one sequence, with a layer norm of each head's queries and keys.
#[derive(Debug)]
pub(super) struct JointAttention {
    to_q: Projection,
    to_k: Projection,
    to_v: Projection,
    to_out: Projection,
    norm_q: LayerNorm,
    norm_k: LayerNorm,
    heads: usize,
    head_dim: usize,
}

impl JointAttention {
    pub(super) fn new(config: &CogVideoXConfig, adapters: Option<&Adapters>, vb: VarBuilder) -> Result<Self> {
        let inner = config.inner_dim();
        let projection = |name: &str, bias| Projection::new(inner, inner, bias, name, adapters, vb.pp(name));
        let norm = |name| layer_norm(config.attention_head_dim, HEAD_NORM_EPS, vb.pp(name));
        Ok(Self {
            to_q: projection("to_q", config.attention_bias)?,
            to_k: projection("to_k", config.attention_bias)?,
            to_v: projection("to_v", config.attention_bias)?,
            to_out: projection("to_out.0", true)?,
            norm_q: norm("norm_q")?,
            norm_k: norm("norm_k")?,
            heads: config.num_attention_heads,
            head_dim: config.attention_head_dim,
        })
    }

    /// `sequence` and the result have shape [batch, tokens, inner].
    pub(super) fn forward(&self, sequence: &Tensor, rotary: Option<&RotaryEmbedding>) -> Result<Tensor> {
        let (batch, tokens, inner) = sequence.dims3()?;
        let split = |projected: Tensor| projected.reshape((batch, tokens, self.heads, self.head_dim));
        let place = |heads: Tensor| {
            let heads = heads.transpose(1, 2)?;
            rotary.map_or(Ok(heads.clone()), |rotary| rotary.apply(&heads, 0))
        };
        let queries = place(self.norm_q.forward(&split(self.to_q.forward(sequence)?)?)?)?;
        let keys = place(self.norm_k.forward(&split(self.to_k.forward(sequence)?)?)?)?;
        let values = split(self.to_v.forward(sequence)?)?.transpose(1, 2)?;
        let scale = 1.0 / (self.head_dim as f64).sqrt();
        let attended = attention(&queries, &keys, &values, scale)?;
        self.to_out
            .forward(&attended.transpose(1, 2)?.reshape((batch, tokens, inner))?)
    }
}
