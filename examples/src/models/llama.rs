//! The Llama decoder, as in HuggingFace transformers' `modeling_llama.py`.
//!
//! Pre-norm decoder layers of grouped-query attention with rotary positions (Touvron et al. 2023, arXiv:2302.13971;
//! Ainslie et al. 2023, arXiv:2305.13245) and a SwiGLU feed-forward network (Shazeer 2020, arXiv:2002.05202).
//! The layers come from `sconce_core::nn`, because candle's own norm and attention kernels have no backward.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Module, VarBuilder};
use sconce_core::nn::{
    Embedding, Linear, RmsNorm, RotaryEmbedding, causal_attention, embedding, linear_b, linear_cross_entropy, rms_norm,
    swiglu,
};
use sconce_core::{Unit, unit_of_class};

use super::LlamaConfig;

/// Label of a position that does not count in the loss, as in PyTorch.
const IGNORED_LABEL: i64 = -100;

/// A Llama language model: token ids in, logits of the next token out.
#[derive(Debug)]
pub struct Llama {
    embed_tokens: Unit<Embedding>,
    layers: Vec<Unit<DecoderLayer>>,
    norm: RmsNorm,
    lm_head: Unit<Linear>,
}

impl Llama {
    /// Creates the model with parameters named as in HuggingFace's files (`model.embed_tokens.weight`,
    /// `model.layers.0.self_attn.q_proj.weight`, ..., `lm_head.weight`).
    ///
    /// With tied embeddings there is no `lm_head.weight`: the embedding table projects the output.
    ///
    /// # Errors
    /// If `vb` has no such parameter or has it with another shape.
    pub fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        let model = vb.pp("model");
        let (vocabulary, hidden) = (config.vocab_size, config.hidden_size);
        let embed = |vb: VarBuilder<'_>| embedding(vocabulary, hidden, vb);
        let embed_tokens = unit_of_class(model.clone(), "embed_tokens", "Embedding", embed)?;
        let rotary = RotaryEmbedding::new(
            config.head_dim,
            config.max_position_embeddings,
            config.rope_theta,
            vb.dtype(),
            vb.device(),
        )?;
        let layer = |index: usize| {
            let build = |vb: VarBuilder<'_>| DecoderLayer::new(config, rotary.clone(), vb);
            unit_of_class(model.pp("layers"), &index.to_string(), "LlamaDecoderLayer", build)
        };
        let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<Vec<_>>>()?;
        let norm = rms_norm(config.hidden_size, config.rms_norm_eps, model.pp("norm"))?;
        let lm_head = if config.tie_word_embeddings {
            let tied = |vb: VarBuilder<'_>| Ok(Linear::new(vb.get((vocabulary, hidden), "weight")?, None));
            unit_of_class(model, "embed_tokens", "Linear", tied)?
        } else {
            unit_of_class(vb, "lm_head", "Linear", |vb| linear_b(hidden, vocabulary, false, vb))?
        };
        Ok(Self {
            embed_tokens,
            layers,
            norm,
            lm_head,
        })
    }

    /// Computes the logits of the next token at every position.
    ///
    /// `tokens`: ids of shape [batch, sequence], i64 or u32. Returns [batch, sequence, vocabulary] in the dtype of the
    /// parameters.
    ///
    /// # Errors
    /// If `tokens` is not of that form, holds an id outside the vocabulary, or its sequences are longer than
    /// `max_position_embeddings`.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(&self.hidden(tokens)?)
    }

    /// What the output layer projects, [batch, sequence, hidden].
    fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        tokens.dims2()?;
        let mut hidden = self.embed_tokens.forward(tokens)?;
        for layer in &self.layers {
            hidden = layer.forward(&hidden)?;
        }
        self.norm.forward(&hidden)
    }

    /// Computes the mean cross-entropy of predicting label t+1 from the tokens up to t.
    ///
    /// `tokens` and `labels`: ids of shape [batch, sequence]; the labels are usually the tokens themselves, with -100
    /// where a position is not to be learnt. The shift happens here. Returns a scalar.
    ///
    /// # Errors
    /// As [`Llama::forward`], or if `labels` has another shape than `tokens` or sequences are shorter than 2.
    pub fn loss(&self, tokens: &Tensor, labels: &Tensor) -> Result<Tensor> {
        let (batch, sequence) = tokens.dims2()?;
        if labels.dims() != tokens.dims() {
            candle_core::bail!(
                "labels have the shape {:?}, expected that of the tokens, {:?}",
                labels.dims(),
                tokens.dims()
            );
        }
        if sequence < 2 {
            candle_core::bail!(
                "sequences have {sequence} tokens, expected at least 2: one to predict from, one to predict"
            );
        }
        let hidden = self.hidden(tokens)?.flatten(0, 1)?;
        // The labels are moved rather than the rows cut: a narrowed view would be copied, and its gradient padded back.
        let last = Tensor::full(IGNORED_LABEL, (batch, 1), labels.device())?;
        let next = Tensor::cat(&[&labels.to_dtype(DType::I64)?.narrow(1, 1, sequence - 1)?, &last], 1)?;
        let next = next.flatten_all()?;
        self.lm_head.run((hidden, next), |lm_head, (hidden, next)| {
            linear_cross_entropy(lm_head, &hidden, &next, IGNORED_LABEL)
        })
    }
}

impl Llama {
    /// Returns how many positions count in [`Llama::loss`], given labels of shape [batch, sequence]: what the mean is over.
    ///
    /// # Errors
    /// If `labels` are not of that form.
    pub fn predictions(labels: &Tensor) -> Result<usize> {
        let rows = labels.to_dtype(DType::I64)?.to_vec2::<i64>()?;
        let of_row = |row: &Vec<i64>| row.iter().skip(1).filter(|label| **label != IGNORED_LABEL).count();
        Ok(rows.iter().map(of_row).sum())
    }
}

/// One layer: attention and feed-forward network, each added to the residual stream [batch, sequence, hidden].
#[derive(Debug)]
struct DecoderLayer {
    input_layernorm: RmsNorm,
    self_attn: Attention,
    post_attention_layernorm: RmsNorm,
    mlp: FeedForward,
}

impl DecoderLayer {
    fn new(config: &LlamaConfig, rotary: RotaryEmbedding, vb: VarBuilder) -> Result<Self> {
        let norm = |name| rms_norm(config.hidden_size, config.rms_norm_eps, vb.pp(name));
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: Attention::new(config, rotary, vb.pp("self_attn"))?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: FeedForward::new(config, vb.pp("mlp"))?,
        })
    }
}

impl Module for DecoderLayer {
    fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let hidden = (hidden + self.self_attn.forward(&self.input_layernorm.forward(hidden)?)?)?;
        &hidden + self.mlp.forward(&self.post_attention_layernorm.forward(&hidden)?)?
    }
}

/// Causal grouped-query attention with rotary positions.
#[derive(Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    rotary: RotaryEmbedding,
    heads: usize,
    key_value_heads: usize,
    head_dim: usize,
}

impl Attention {
    fn new(config: &LlamaConfig, rotary: RotaryEmbedding, vb: VarBuilder) -> Result<Self> {
        let width = config.num_attention_heads * config.head_dim;
        let key_value_width = config.num_key_value_heads * config.head_dim;
        let linear = |input, output, name| linear_b(input, output, config.attention_bias, vb.pp(name));
        Ok(Self {
            q_proj: linear(config.hidden_size, width, "q_proj")?,
            k_proj: linear(config.hidden_size, key_value_width, "k_proj")?,
            v_proj: linear(config.hidden_size, key_value_width, "v_proj")?,
            o_proj: linear(width, config.hidden_size, "o_proj")?,
            rotary,
            heads: config.num_attention_heads,
            key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
        })
    }
}

impl Module for Attention {
    fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let (batch, sequence, _) = hidden.dims3()?;
        let split = |projected: Tensor, heads| {
            projected
                .reshape((batch, sequence, heads, self.head_dim))?
                .transpose(1, 2)
        };
        let queries = split(self.q_proj.forward(hidden)?, self.heads)?;
        let keys = split(self.k_proj.forward(hidden)?, self.key_value_heads)?;
        let values = split(self.v_proj.forward(hidden)?, self.key_value_heads)?;

        let queries = self.rotary.apply(&queries, 0)?;
        let keys = self.rotary.apply(&keys, 0)?;
        let scale = 1.0 / (self.head_dim as f64).sqrt();
        let attended = causal_attention(&queries, &keys, &values, scale)?;

        let merged = attended
            .transpose(1, 2)?
            .reshape((batch, sequence, self.heads * self.head_dim))?;
        self.o_proj.forward(&merged)
    }
}

/// The SwiGLU feed-forward network, `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
struct FeedForward {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

impl FeedForward {
    fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        let linear = |input, output, name| linear_b(input, output, config.mlp_bias, vb.pp(name));
        Ok(Self {
            gate_proj: linear(config.hidden_size, config.intermediate_size, "gate_proj")?,
            up_proj: linear(config.hidden_size, config.intermediate_size, "up_proj")?,
            down_proj: linear(config.intermediate_size, config.hidden_size, "down_proj")?,
        })
    }
}

impl Module for FeedForward {
    fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let gated = swiglu(&self.gate_proj.forward(hidden)?, &self.up_proj.forward(hidden)?)?;
        self.down_proj.forward(&gated)
    }
}
