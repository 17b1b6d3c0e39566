//! Turns the `config.json` of a Llama model into plain, checked values.
//!
//! The file has changed its shape over the years (`rope_theta` at the top, later inside `rope_parameters`) and leaves
//! out what equals a default, so reading it is kept away from the model: [`super::Llama`] sees only values that fit
//! together. A setting that would change the result and is not implemented is an error, never ignored.

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

use crate::huggingface::ModelFolder;

/// Shape and constants of a Llama model, checked to fit together.
///
/// Names and defaults are those of `LlamaConfig` in HuggingFace transformers.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
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
    /// Longest sequence for which rotary positions are prepared.
    pub max_position_embeddings: usize,
    /// Added to the mean square inside every RMS norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Whether the output projection is the embedding table itself.
    pub tie_word_embeddings: bool,
    /// Whether the four attention projections have biases.
    pub attention_bias: bool,
    /// Whether the three feed-forward projections have biases.
    pub mlp_bias: bool,
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
            // The architecture first: another model's file need not have the fields of this one.
            let architecture: Architecture = serde_json::from_str(text)?;
            architecture.check()?;
            let file: ConfigFile = serde_json::from_str(text)?;
            let config = file.into_config()?;
            config.check()?;
            Ok(config)
        };
        read().with_context(|| format!("{}: cannot be used as a Llama configuration", path.display()))
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
        for (name, value) in [("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)] {
            ensure!(
                value.is_finite() && value > 0.0,
                "`{name}` is {value}, expected a positive number"
            );
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Architecture {
    model_type: Option<String>,
    architectures: Option<Vec<String>>,
}

impl Architecture {
    fn check(&self) -> Result<()> {
        let type_fits = self.model_type.as_ref().is_none_or(|found| found == "llama");
        let class_fits = self
            .architectures
            .as_ref()
            .is_none_or(|found| found.iter().any(|name| name == "LlamaForCausalLM"));
        let named = self.model_type.is_some() || self.architectures.is_some();
        if named && type_fits && class_fits {
            return Ok(());
        }
        bail!(
            "found `model_type` {} and `architectures` {}, supported are `model_type` \"llama\" with `architectures` \
             [\"LlamaForCausalLM\"]; choose a Llama model",
            self.model_type
                .as_ref()
                .map_or("missing".to_owned(), |found| format!("{found:?}")),
            self.architectures
                .as_ref()
                .map_or("missing".to_owned(), |found| format!("{found:?}")),
        )
    }
}

/// The fields of the file as they are; what has no default in transformers' own files is required.
#[derive(Deserialize)]
struct ConfigFile {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    hidden_act: Option<String>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    attention_dropout: Option<f64>,
    rope_theta: Option<f64>,
    /// transformers 5.
    rope_parameters: Option<RopeParameters>,
    /// transformers 4.
    rope_scaling: Option<RopeParameters>,
}

#[derive(Default, Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    partial_rotary_factor: Option<f64>,
}

impl ConfigFile {
    fn into_config(self) -> Result<LlamaConfig> {
        if let Some(found) = self.hidden_act.as_ref().filter(|found| *found != "silu") {
            bail!("`hidden_act` is {found:?}, supported is \"silu\"");
        }
        if let Some(found) = self.attention_dropout.filter(|found| *found != 0.0) {
            bail!("`attention_dropout` is {found}, supported is 0");
        }
        let head_dim = match self.head_dim {
            Some(head_dim) => head_dim,
            None => {
                ensure!(
                    self.num_attention_heads > 0 && self.hidden_size.is_multiple_of(self.num_attention_heads),
                    "`hidden_size` is {} and `num_attention_heads` is {}, expected the first to be a multiple of the \
                     second where `head_dim` is not given",
                    self.hidden_size,
                    self.num_attention_heads
                );
                self.hidden_size / self.num_attention_heads
            }
        };
        Ok(LlamaConfig {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim,
            max_position_embeddings: self.max_position_embeddings.unwrap_or(2048),
            rms_norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            rope_theta: self.rope_theta()?,
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(false),
            attention_bias: self.attention_bias.unwrap_or(false),
            mlp_bias: self.mlp_bias.unwrap_or(false),
        })
    }

    fn rope_theta(&self) -> Result<f64> {
        for (name, parameters) in [
            ("rope_parameters", &self.rope_parameters),
            ("rope_scaling", &self.rope_scaling),
        ] {
            let Some(parameters) = parameters else { continue };
            if let Some(found) = parameters.rope_type.as_ref().filter(|found| *found != "default") {
                bail!("`{name}.rope_type` is {found:?}, supported is \"default\"");
            }
            if let Some(found) = parameters.partial_rotary_factor.filter(|found| *found != 1.0) {
                bail!("`{name}.partial_rotary_factor` is {found}, supported is 1");
            }
        }
        let nested = self
            .rope_parameters
            .as_ref()
            .and_then(|parameters| parameters.rope_theta);
        Ok(nested.or(self.rope_theta).unwrap_or(10_000.0))
    }
}
