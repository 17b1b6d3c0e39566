//! The fields of a `config.json` as they are, and what they mean in each family.

use anyhow::{Result, bail, ensure};
use serde::Deserialize;

use super::llama_config::{Family, LlamaConfig};
use super::rope_file::RopeFields;

/// What is read of the file; what has no default in transformers' own files is required.
#[derive(Deserialize)]
pub(super) struct ConfigFile {
    /// Found out before the rest is read.
    #[serde(skip)]
    family: Family,
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
    initializer_range: Option<f64>,
    /// Absent is not null here: Mistral has a window unless the file says it has none.
    #[serde(default, deserialize_with = "present")]
    sliding_window: Option<Option<usize>>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    layer_types: Option<Vec<String>>,
    #[serde(flatten)]
    rope: RopeFields,
}

fn present<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<Option<usize>>, D::Error> {
    Option::deserialize(value).map(Some)
}

#[derive(Deserialize)]
struct Architecture {
    model_type: Option<String>,
    architectures: Option<Vec<String>>,
}

impl Architecture {
    fn family(&self) -> Result<Family> {
        let fits = |family: &Family| {
            let by_type = self.model_type.as_ref().map(|found| found == family.model_type());
            let classes = self.architectures.as_ref();
            let by_class = classes.map(|found| found.iter().any(|name| name == family.class()));
            by_type.or(by_class).is_some() && by_type.unwrap_or(true) && by_class.unwrap_or(true)
        };
        if let Some(family) = Family::ALL.into_iter().find(fits) {
            return Ok(family);
        }
        let supported = Family::ALL.map(|family| format!("{:?} with {:?}", family.model_type(), [family.class()]));
        bail!(
            "found `model_type` {} and `architectures` {}, supported are {}; choose a model of these",
            self.model_type
                .as_ref()
                .map_or("missing".to_owned(), |found| format!("{found:?}")),
            self.architectures
                .as_ref()
                .map_or("missing".to_owned(), |found| format!("{found:?}")),
            supported.join(", ")
        )
    }
}

impl ConfigFile {
    /// # Errors
    /// If the text is no JSON object with the fields of a model of these families.
    pub(super) fn parse(text: &str) -> Result<Self> {
        // The architecture first: another model's file need not have the fields of this one.
        let family = serde_json::from_str::<Architecture>(text)?.family()?;
        let file: Self = serde_json::from_str(text)?;
        Ok(Self { family, ..file })
    }

    /// # Errors
    /// If the file asks for what the model does not do, or sizes do not divide.
    pub(super) fn into_config(self) -> Result<LlamaConfig> {
        if let Some(found) = self.hidden_act.as_ref().filter(|found| *found != "silu") {
            bail!("`hidden_act` is {found:?}, supported is \"silu\"");
        }
        if let Some(found) = self.attention_dropout.filter(|found| *found != 0.0) {
            bail!("`attention_dropout` is {found}, supported is 0");
        }
        let defaults = LlamaConfig::default();
        let max_position_embeddings = self.max_position_embeddings.unwrap_or(match self.family {
            Family::Llama => defaults.max_position_embeddings,
            Family::Mistral => 4096 * 32,
            Family::Qwen2 | Family::Qwen3 => 32_768,
        });
        let (rope_theta, rope_scaling) = self.rope.read(max_position_embeddings)?;
        let all_biases = match self.family {
            Family::Llama | Family::Qwen3 => self.attention_bias.unwrap_or(false),
            // transformers has no such setting there, and ignores it.
            Family::Mistral | Family::Qwen2 => false,
        };
        Ok(LlamaConfig {
            family: self.family,
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads.unwrap_or(self.num_attention_heads),
            head_dim: self.head_dim()?,
            max_position_embeddings,
            rms_norm_eps: self.rms_norm_eps.unwrap_or(defaults.rms_norm_eps),
            rope_theta,
            rope_scaling,
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(false),
            attention_bias: all_biases || self.family == Family::Qwen2,
            attention_output_bias: all_biases,
            mlp_bias: self.family == Family::Llama && self.mlp_bias.unwrap_or(false),
            query_key_norm: self.family == Family::Qwen3,
            sliding_windows: self.sliding_windows()?,
            initializer_range: self.initializer_range.unwrap_or(defaults.initializer_range),
        })
    }

    fn head_dim(&self) -> Result<usize> {
        match (self.head_dim, self.family) {
            (Some(head_dim), _) => Ok(head_dim),
            (None, Family::Qwen3) => Ok(128),
            (None, _) => {
                ensure!(
                    self.num_attention_heads > 0 && self.hidden_size.is_multiple_of(self.num_attention_heads),
                    "`hidden_size` is {} and `num_attention_heads` is {}, expected the first to be a multiple of the \
                     second where `head_dim` is not given",
                    self.hidden_size,
                    self.num_attention_heads
                );
                Ok(self.hidden_size / self.num_attention_heads)
            }
        }
    }

    /// Returns the window of each layer, and nothing where no layer has one.
    fn sliding_windows(&self) -> Result<Vec<Option<usize>>> {
        let has_window = match self.family {
            // Llama's files have no such setting, and transformers reads none there.
            Family::Llama => false,
            Family::Mistral => true,
            Family::Qwen2 | Family::Qwen3 => self.use_sliding_window.unwrap_or(false),
        };
        let Some(window) = self.sliding_window.unwrap_or(Some(4096)).filter(|_| has_window) else {
            return Ok(Vec::new());
        };
        ensure!(window > 0, "`sliding_window` is 0, expected at least 1 token, or null");
        // Checked with the other sizes later on; here it must not fill memory.
        let layers = self.num_hidden_layers.min(1 << 22);
        if self.family == Family::Mistral {
            return Ok(vec![Some(window); layers]);
        }
        let Some(types) = &self.layer_types else {
            let first = self.max_window_layers.unwrap_or(28);
            return Ok((0..layers)
                .map(|layer| Some(window).filter(|_| layer >= first))
                .collect());
        };
        ensure!(
            types.len() == self.num_hidden_layers,
            "`layer_types` has {} entries and `num_hidden_layers` is {}, expected as many",
            types.len(),
            self.num_hidden_layers
        );
        let window_of = |kind: &String| match kind.as_str() {
            "sliding_attention" => Ok(Some(window)),
            "full_attention" => Ok(None),
            other => bail!("`layer_types` has {other:?}, supported are \"full_attention\" and \"sliding_attention\""),
        };
        types.iter().map(window_of).collect()
    }
}
