//! Turns the `config.json` of a Llama-family model into plain, checked values.
//!
//! The file has changed its shape over the years (`rope_theta` at the top, later inside `rope_parameters`) and leaves
//! out what equals a default, so reading it ([`config_file`](super::config_file)) is kept away from the model:
//! [`super::Llama`] sees only values that fit together. A setting that would change the result and is not implemented is an
//! error, never ignored.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use super::config_file::ConfigFile;
use super::rope_scaling::RopeScaling;
use crate::huggingface::ModelFolder;

/// A family of models that differ from Llama in little.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Family {
    /// Llama 1 to 3.
    #[default]
    Llama,
    /// Mistral 7B: attention within a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: biases of queries, keys and values; a window in later layers, if any.
    Qwen2,
    /// Qwen3: queries and keys are normalised by head.
    Qwen3,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 4] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3];

    /// Returns what `model_type` says of such a model.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// Returns the class of such a model in transformers.
    pub fn class(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// Returns the class of its decoder layers in transformers, by which wrap policies name them.
    pub fn layer_class(self) -> &'static str {
        match self {
            Self::Llama => "LlamaDecoderLayer",
            Self::Mistral => "MistralDecoderLayer",
            Self::Qwen2 => "Qwen2DecoderLayer",
            Self::Qwen3 => "Qwen3DecoderLayer",
        }
    }
}

/// Shape and constants of a Llama-family model, checked to fit together.
///
/// Names and defaults are those of `LlamaConfig` in HuggingFace transformers.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Whose names the model's parts have.
    pub family: Family,
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward layers.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads, a divisor of the number of query heads.
    pub num_key_value_heads: usize,
    /// Width of one head, even.
    pub head_dim: usize,
    /// Longest sequence that the model reads, in tokens, but for what `rope_scaling` adds.
    pub max_position_embeddings: usize,
    /// Added to the mean square inside every RMS norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How these are changed for longer sequences.
    pub rope_scaling: RopeScaling,
    /// Whether the output projection is the embedding table itself.
    pub tie_word_embeddings: bool,
    /// Whether the projections of queries, keys and values have biases.
    pub attention_bias: bool,
    /// Whether the projection after attention has a bias.
    pub attention_output_bias: bool,
    /// Whether the three feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys are normalised by head.
    pub query_key_norm: bool,
    /// Of each layer, how many tokens a token attends to, itself included; layers beyond the list, and those without a number,
    /// attend to all before.
    pub sliding_windows: Vec<Option<usize>>,
    /// Standard deviation of the embedding where a model begins with random weights.
    pub initializer_range: f64,
}

impl Default for LlamaConfig {
    /// Llama-2-7B's.
    fn default() -> Self {
        Self {
            family: Family::Llama,
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 11_008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: 128,
            max_position_embeddings: 2048,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            rope_scaling: RopeScaling::Default,
            tie_word_embeddings: false,
            attention_bias: false,
            attention_output_bias: false,
            mlp_bias: false,
            query_key_norm: false,
            sliding_windows: Vec::new(),
            initializer_range: 0.02,
        }
    }
}

impl LlamaConfig {
    /// Reads the configuration of an opened model folder.
    ///
    /// # Errors
    /// As [`LlamaConfig::from_json`].
    pub fn from_model_folder(folder: &ModelFolder) -> Result<Self> {
        Self::from_json(&folder.config, &folder.config_path())
    }

    /// Reads the text of a `config.json`; `path` is only used to say where an error was found.
    ///
    /// # Errors
    /// If the text is not such a file, describes another architecture, asks for something that [`super::Llama`]
    /// does not implement, or holds sizes that do not fit together.
    pub fn from_json(text: &str, path: &Path) -> Result<Self> {
        let read = || -> Result<Self> {
            let config = ConfigFile::parse(text)?.into_config()?;
            config.check()?;
            Ok(config)
        };
        read().with_context(|| format!("{}: cannot be used as a Llama configuration", path.display()))
    }

    /// Returns how many tokens a token attends to in a layer; all before it where that is `None`.
    pub fn sliding_window(&self, layer: usize) -> Option<usize> {
        self.sliding_windows.get(layer).copied().flatten()
    }

    fn check(&self) -> Result<()> {
        /// Larger than any model's; what is larger would only fill memory.
        const LARGEST: usize = 1 << 22;
        for (name, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            ensure!(value > 0, "`{name}` is 0, expected at least 1");
            ensure!(value <= LARGEST, "`{name}` is {value}, expected at most {LARGEST}");
        }
        ensure!(
            self.num_attention_heads.is_multiple_of(self.num_key_value_heads),
            "`num_attention_heads` is {} and `num_key_value_heads` is {}, expected the first to be a multiple of the \
             second",
            self.num_attention_heads,
            self.num_key_value_heads
        );
        ensure!(
            self.head_dim.is_multiple_of(2),
            "`head_dim` is {}, expected an even number, since rotary positions turn pairs of elements",
            self.head_dim
        );
        for (name, value) in [
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
            ("initializer_range", self.initializer_range),
        ] {
            ensure!(
                value.is_finite() && value > 0.0,
                "`{name}` is {value}, expected a positive number"
            );
        }
        self.rope_scaling.check()
    }
}
