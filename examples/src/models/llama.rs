//! The Llama decoder and its relatives, as in HuggingFace transformers' `modeling_llama.py`, `modeling_mistral.py`,
//! `modeling_qwen2.py` and `modeling_qwen3.py`.
//!
//! Pre-norm decoder layers of grouped-query attention with rotary positions (Touvron et al. 2023, arXiv:2302.13971;
//! Ainslie et al. 2023, arXiv:2305.13245) and a SwiGLU feed-forward network (Shazeer 2020, arXiv:2002.05202).
//! The layers come from `sconce_core::nn`, because candle's own norm and attention kernels have no backward.

use candle_core::{DType, IndexOp as _, ModuleT as _, Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};
use sconce_core::nn::{
    CausalMask, Embedding, Linear, RmsNorm, RotaryEmbedding, cross_entropy, embedding, linear_b, linear_cross_entropy,
    masked_attention, rms_norm, swiglu,
};
use sconce_core::{Unit, unit_of_class};

use super::llama_adapters::{LlamaAdapters, Projection};
use super::llama_config::LlamaConfig;
use super::rotary_tables::RotaryTables;

/// Label of a position that does not count in the loss, as in PyTorch.
const IGNORED_LABEL: i64 = -100;

/// A language model of the Llama family: token ids in, logits of the next token out.
#[derive(Debug)]
pub struct Llama {
    embed_tokens: Unit<Embedding>,
    layers: Vec<Unit<DecoderLayer>>,
    norm: RmsNorm,
    lm_head: Unit<Linear>,
    rotary: RotaryTables,
}

/// How a batch is read; the default is whole rows, without dropout.
#[derive(Debug, Clone, Default)]
pub struct Reading {
    /// Whether adapters drop elements of their input.
    pub train: bool,
    /// For each position of each row, row after row, where its document begins in the row, if rows hold several: tokens do
    /// not attend to other documents.
    pub document_starts: Option<Vec<u32>>,
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
        Self::with_adapters(config, None, vb)
    }

    /// Creates the model with adapters beside the projections that they name.
    ///
    /// # Errors
    /// As [`Llama::new`].
    pub fn with_adapters(config: &LlamaConfig, adapters: Option<&LlamaAdapters>, vb: VarBuilder) -> Result<Self> {
        let model = vb.pp("model");
        let (vocabulary, hidden) = (config.vocab_size, config.hidden_size);
        let embed = |vb: VarBuilder<'_>| {
            // Whoever asks first says what random values are drawn: those of `nn::embedding` would be large for a tied output.
            let normal = Init::Randn {
                mean: 0.0,
                stdev: config.initializer_range,
            };
            vb.get_with_hints((vocabulary, hidden), "weight", normal)?;
            embedding(vocabulary, hidden, vb)
        };
        let embed_tokens = unit_of_class(model.clone(), "embed_tokens", "Embedding", embed)?;
        let layer = |index: usize| {
            let build = |vb: VarBuilder<'_>| DecoderLayer::new(config, index, adapters, vb);
            unit_of_class(
                model.pp("layers"),
                &index.to_string(),
                config.family.layer_class(),
                build,
            )
        };
        let layers = (0..config.num_hidden_layers).map(layer).collect::<Result<Vec<_>>>()?;
        let norm = rms_norm(config.hidden_size, config.rms_norm_eps, model.pp("norm"))?;
        let rotary = RotaryTables::new(config, vb.dtype(), vb.device());
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
            rotary,
        })
    }

    /// Computes the logits of the next token at every position.
    ///
    /// `tokens`: ids of shape [batch, sequence], i64 or u32. Returns [batch, sequence, vocabulary] in the dtype of the
    /// parameters.
    ///
    /// # Errors
    /// If `tokens` is not of that form, holds an id outside the vocabulary, or its sequences are longer than
    /// the model reads.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        self.read(tokens, &Reading::default())
    }

    /// Does what [`Llama::forward`] does, reading the batch in another way.
    ///
    /// # Errors
    /// As there, or if there are not as many document starts as tokens.
    pub fn read(&self, tokens: &Tensor, reading: &Reading) -> Result<Tensor> {
        self.lm_head.forward(&self.hidden(tokens, reading)?)
    }

    /// Returns what the output projection reads, [batch, sequence, hidden].
    fn hidden(&self, tokens: &Tensor, reading: &Reading) -> Result<Tensor> {
        let (_, sequence) = tokens.dims2()?;
        let place = Place {
            train: reading.train,
            rotary: self.rotary.for_sequence(sequence)?,
            documents: match &reading.document_starts {
                Some(starts) => CausalMask::documents(starts.clone()),
                None => CausalMask::default(),
            },
        };
        let mut hidden = self.embed_tokens.forward(tokens)?;
        for layer in &self.layers {
            let place = place.clone();
            hidden = layer.run(hidden, move |layer, hidden| layer.forward(&hidden, &place))?;
        }
        self.norm.forward(&hidden)
    }

    /// Computes the logits of the token after the last of each row, [batch, vocabulary].
    ///
    /// # Errors
    /// As [`Llama::forward`].
    pub fn next_token_logits(&self, tokens: &Tensor) -> Result<Tensor> {
        let hidden = self.hidden(tokens, &Reading::default())?;
        let last = hidden.narrow(1, hidden.dim(1)? - 1, 1)?.contiguous()?;
        self.lm_head.forward(&last)?.squeeze(1)
    }

    /// Computes the mean cross-entropy of predicting label t+1 from the tokens up to t.
    ///
    /// `tokens` and `labels`: ids of shape [batch, sequence]; the labels are usually the tokens themselves, with -100
    /// where a position is not to be learnt. The shift happens here. Returns a scalar.
    ///
    /// # Errors
    /// As [`Llama::forward`], or if `labels` has another shape than `tokens` or sequences are shorter than 2.
    pub fn loss(&self, tokens: &Tensor, labels: &Tensor) -> Result<Tensor> {
        self.loss_of(tokens, labels, &Reading::default())
    }

    /// Does what [`Llama::loss`] does, reading the batch in another way.
    ///
    /// # Errors
    /// As there, and as [`Llama::read`].
    pub fn loss_of(&self, tokens: &Tensor, labels: &Tensor, reading: &Reading) -> Result<Tensor> {
        let next = next_labels(tokens, labels)?;
        let inputs = (self.hidden(tokens, reading)?.flatten(0, 1)?, next.flatten_all()?);
        self.lm_head.run(inputs, |lm_head, (hidden, next)| {
            linear_cross_entropy(lm_head, &hidden, &next, IGNORED_LABEL)
        })
    }

    /// Computes for each row the sum of what [`Llama::loss`] averages, and how many positions count in it: two tensors
    /// `[batch]`, f32 (f64 in f64).
    ///
    /// # Errors
    /// As [`Llama::loss_of`].
    pub fn row_losses(&self, tokens: &Tensor, labels: &Tensor, reading: &Reading) -> Result<(Tensor, Tensor)> {
        let next = next_labels(tokens, labels)?;
        let logits = self.read(tokens, reading)?;
        let (mut sums, mut counts) = (Vec::new(), Vec::new());
        for row in 0..tokens.dim(0)? {
            let labels = next.i(row)?.to_vec1::<i64>()?;
            let count = labels.iter().filter(|label| **label != IGNORED_LABEL).count() as f64;
            let mean = cross_entropy(&logits.i(row)?, &next.i(row)?, IGNORED_LABEL)?.detach();
            sums.push((mean * count)?);
            counts.push(count);
        }
        let sums = Tensor::stack(&sums, 0)?;
        let counts = Tensor::new(counts, sums.device())?.to_dtype(sums.dtype())?;
        Ok((sums, counts))
    }
}

/// Returns the labels moved by one to the left, [batch, sequence]: what each position is to predict.
fn next_labels(tokens: &Tensor, labels: &Tensor) -> Result<Tensor> {
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
    // The labels are moved rather than the logits cut: a narrowed view of the logits would be copied, and its
    // gradient padded back, at the size of the whole vocabulary.
    let last = Tensor::full(IGNORED_LABEL, (batch, 1), labels.device())?;
    Tensor::cat(&[&labels.to_dtype(DType::I64)?.narrow(1, 1, sequence - 1)?, &last], 1)
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

/// What all layers need of the batch that is read.
#[derive(Debug, Clone)]
struct Place {
    train: bool,
    rotary: RotaryEmbedding,
    documents: CausalMask,
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
    fn new(config: &LlamaConfig, index: usize, adapters: Option<&LlamaAdapters>, vb: VarBuilder) -> Result<Self> {
        let norm = |name| rms_norm(config.hidden_size, config.rms_norm_eps, vb.pp(name));
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            self_attn: Attention::new(config, index, adapters, vb.pp("self_attn"))?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            mlp: FeedForward::new(config, adapters, vb.pp("mlp"))?,
        })
    }

    fn forward(&self, hidden: &Tensor, place: &Place) -> Result<Tensor> {
        let hidden = (hidden + self.self_attn.forward(&self.input_layernorm.forward(hidden)?, place)?)?;
        &hidden
            + self
                .mlp
                .forward(&self.post_attention_layernorm.forward(&hidden)?, place.train)?
    }
}

/// Causal grouped-query attention with rotary positions.
#[derive(Debug)]
struct Attention {
    q_proj: Projection,
    k_proj: Projection,
    v_proj: Projection,
    o_proj: Projection,
    /// Of queries and keys, over each head.
    norms: Option<(RmsNorm, RmsNorm)>,
    window: Option<usize>,
    heads: usize,
    key_value_heads: usize,
    head_dim: usize,
}

impl Attention {
    fn new(config: &LlamaConfig, index: usize, adapters: Option<&LlamaAdapters>, vb: VarBuilder) -> Result<Self> {
        let width = config.num_attention_heads * config.head_dim;
        let key_value_width = config.num_key_value_heads * config.head_dim;
        let projection = |shape, bias, name| Projection::new(shape, bias, name, adapters, &vb);
        let (hidden, bias) = (config.hidden_size, config.attention_bias);
        let norm = |name| rms_norm(config.head_dim, config.rms_norm_eps, vb.pp(name));
        Ok(Self {
            q_proj: projection((hidden, width), bias, "q_proj")?,
            k_proj: projection((hidden, key_value_width), bias, "k_proj")?,
            v_proj: projection((hidden, key_value_width), bias, "v_proj")?,
            o_proj: projection((width, hidden), config.attention_output_bias, "o_proj")?,
            norms: match config.query_key_norm {
                true => Some((norm("q_norm")?, norm("k_norm")?)),
                false => None,
            },
            window: config.sliding_window(index),
            heads: config.num_attention_heads,
            key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
        })
    }

    fn forward(&self, hidden: &Tensor, place: &Place) -> Result<Tensor> {
        let (batch, sequence, _) = hidden.dims3()?;
        let project = |projection: &Projection, heads, norm: Option<&RmsNorm>| {
            let projected = projection.forward_t(hidden, place.train)?;
            let split = projected.reshape((batch, sequence, heads, self.head_dim))?;
            match norm {
                Some(norm) => norm.forward(&split)?.transpose(1, 2),
                None => split.transpose(1, 2),
            }
        };
        let norms = self.norms.as_ref();
        let queries = project(&self.q_proj, self.heads, norms.map(|(queries, _)| queries))?;
        let keys = project(&self.k_proj, self.key_value_heads, norms.map(|(_, keys)| keys))?;
        let values = project(&self.v_proj, self.key_value_heads, None)?;

        let queries = place.rotary.apply(&queries, 0)?;
        let keys = place.rotary.apply(&keys, 0)?;
        let scale = 1.0 / (self.head_dim as f64).sqrt();
        let mask = place.documents.clone().within(self.window);
        let attended = masked_attention(&queries, &keys, &values, scale, &mask)?;

        let merged = attended
            .transpose(1, 2)?
            .reshape((batch, sequence, self.heads * self.head_dim))?;
        self.o_proj.forward_t(&merged, place.train)
    }
}

/// The SwiGLU feed-forward network, `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
struct FeedForward {
    gate_proj: Projection,
    up_proj: Projection,
    down_proj: Projection,
}

impl FeedForward {
    fn new(config: &LlamaConfig, adapters: Option<&LlamaAdapters>, vb: VarBuilder) -> Result<Self> {
        let projection = |shape, name| Projection::new(shape, config.mlp_bias, name, adapters, &vb);
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            gate_proj: projection((hidden, inner), "gate_proj")?,
            up_proj: projection((hidden, inner), "up_proj")?,
            down_proj: projection((inner, hidden), "down_proj")?,
        })
    }

    fn forward(&self, hidden: &Tensor, train: bool) -> Result<Tensor> {
        let [gate, up] = [&self.gate_proj, &self.up_proj].map(|projection| projection.forward_t(hidden, train));
        self.down_proj.forward_t(&swiglu(&gate?, &up?)?, train)
    }
}
