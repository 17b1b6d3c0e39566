//! One block: attention and a feed-forward network, each fed, and added to text and video, as the time step says.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use sconce_core::nn::{LayerNorm, Linear, RotaryEmbedding, adaptive_layer_norm, gelu_tanh, layer_norm, linear};

use super::attention::JointAttention;
use super::projection::Projection;
use super::{Adapters, CogVideoXConfig};

/// diffusers' `CogVideoXBlock`. The text is the first part of the sequence, [batch, tokens, inner].
#[derive(Debug)]
pub(super) struct Block {
    norm1: ModulatedNorm,
    attn1: JointAttention,
    norm2: ModulatedNorm,
    ff: FeedForward,
}

impl Block {
    pub(super) fn new(config: &CogVideoXConfig, adapters: Option<&Adapters>, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            norm1: ModulatedNorm::new(config, vb.pp("norm1"))?,
            attn1: JointAttention::new(config, adapters, vb.pp("attn1"))?,
            norm2: ModulatedNorm::new(config, vb.pp("norm2"))?,
            ff: FeedForward::new(config, adapters, vb.pp("ff"))?,
        })
    }

    /// `time` is the embedding of the time step, [batch, time_embed_dim]; `text` says how many tokens are text.
    pub(super) fn forward(
        &self,
        sequence: &Tensor,
        time: &Tensor,
        text: usize,
        rotary: Option<&RotaryEmbedding>,
    ) -> Result<Tensor> {
        // Once for both norms: their gradients then meet here, in the same order whether the block is computed again or not.
        let time = &time.silu()?;
        let (normalized, gates) = self.norm1.forward(sequence, time, text)?;
        let sequence = gates.add(sequence, &self.attn1.forward(&normalized, rotary)?)?;
        let (normalized, gates) = self.norm2.forward(&sequence, time, text)?;
        gates.add(&sequence, &self.ff.forward(&normalized)?)
    }
}

/// diffusers' `CogVideoXLayerNormZero`: one norm, with a scale, a shift and a gate for the video and others for the text.
#[derive(Debug)]
struct ModulatedNorm {
    linear: Linear,
    norm: LayerNorm,
}

/// By what results are multiplied before they are added: [batch, 1, inner] for text and for video.
struct Gates {
    text: Tensor,
    video: Tensor,
    tokens: usize,
}

impl ModulatedNorm {
    fn new(config: &CogVideoXConfig, vb: VarBuilder) -> Result<Self> {
        let inner = config.inner_dim();
        Ok(Self {
            linear: linear(config.time_embed_dim, 6 * inner, vb.pp("linear"))?,
            norm: layer_norm(inner, config.norm_eps, vb.pp("norm"))?,
        })
    }

    fn forward(&self, sequence: &Tensor, time: &Tensor, text: usize) -> Result<(Tensor, Gates)> {
        let (words, patches) = split(sequence, text)?;
        let chunks = self.linear.forward(time)?.chunk(6, 1)?;
        let [shift, scale, gate, text_shift, text_scale, text_gate] = chunks.as_slice() else {
            candle_core::bail!("expected six parts of {:?}", time.dims())
        };
        let words = adaptive_layer_norm(&self.norm, &words, text_scale, text_shift)?;
        let patches = adaptive_layer_norm(&self.norm, &patches, scale, shift)?;
        let gates = Gates {
            text: text_gate.unsqueeze(1)?,
            video: gate.unsqueeze(1)?,
            tokens: text,
        };
        Ok((Tensor::cat(&[words, patches], 1)?, gates))
    }
}

impl Gates {
    fn add(&self, sequence: &Tensor, result: &Tensor) -> Result<Tensor> {
        let (words, patches) = split(result, self.tokens)?;
        let gated = [words.broadcast_mul(&self.text)?, patches.broadcast_mul(&self.video)?];
        sequence + Tensor::cat(&gated, 1)?
    }
}

/// Returns text and video of a sequence.
pub(super) fn split(sequence: &Tensor, text: usize) -> Result<(Tensor, Tensor)> {
    let patches = sequence.dim(1)? - text;
    Ok((sequence.narrow(1, 0, text)?, sequence.narrow(1, text, patches)?))
}

/// Two linear layers with GELU between them.
#[derive(Debug)]
struct FeedForward {
    widen: Projection,
    narrow: Projection,
}

impl FeedForward {
    fn new(config: &CogVideoXConfig, adapters: Option<&Adapters>, vb: VarBuilder) -> Result<Self> {
        let inner = config.inner_dim();
        let net = vb.pp("net");
        Ok(Self {
            widen: Projection::new(inner, 4 * inner, true, "ff.net.0.proj", adapters, net.pp("0.proj"))?,
            narrow: Projection::new(4 * inner, inner, true, "ff.net.2", adapters, net.pp("2"))?,
        })
    }
}

impl Module for FeedForward {
    fn forward(&self, sequence: &Tensor) -> Result<Tensor> {
        self.narrow.forward(&gelu_tanh(&self.widen.forward(sequence)?)?)
    }
}
