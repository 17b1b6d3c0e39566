//! Rotary settings of a `config.json`, in the forms of both generations of the file.

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;

use super::rope_scaling::RopeScaling;

/// The fields about rotary positions.
#[derive(Default, Deserialize)]
pub(super) struct RopeFields {
    rope_theta: Option<f64>,
    /// transformers 5.
    rope_parameters: Option<RopeParameters>,
    /// transformers 4.
    rope_scaling: Option<RopeParameters>,
    /// Where Phi-like files of transformers 4 have it.
    original_max_position_embeddings: Option<usize>,
}

#[derive(Clone, Default, Deserialize)]
struct RopeParameters {
    rope_theta: Option<f64>,
    #[serde(alias = "type")]
    rope_type: Option<String>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
}

impl RopeFields {
    /// Returns the base of the frequencies, and how they are changed.
    ///
    /// # Errors
    /// If the file asks for another kind, or leaves out what its kind needs.
    pub(super) fn read(&self, max_position_embeddings: usize) -> Result<(f64, RopeScaling)> {
        let nested = self
            .rope_parameters
            .as_ref()
            .and_then(|parameters| parameters.rope_theta);
        let theta = nested.or(self.rope_theta).unwrap_or(10_000.0);
        let found = match (&self.rope_parameters, &self.rope_scaling) {
            (Some(parameters), _) => Some(("rope_parameters", parameters.clone())),
            (None, scaling) => scaling.as_ref().map(|parameters| ("rope_scaling", parameters.clone())),
        };
        let Some((key, mut parameters)) = found else {
            return Ok((theta, RopeScaling::Default));
        };
        let original = self.original_max_position_embeddings;
        parameters.original_max_position_embeddings = parameters.original_max_position_embeddings.or(original);
        let scaling = parameters.scaling(max_position_embeddings);
        Ok((theta, scaling.with_context(|| format!("`{key}`"))?))
    }
}

impl RopeParameters {
    fn scaling(&self, max_position_embeddings: usize) -> Result<RopeScaling> {
        if let Some(found) = self.partial_rotary_factor.filter(|found| *found != 1.0) {
            bail!("`partial_rotary_factor` is {found}, supported is 1");
        }
        let factor = || self.factor.context("`factor` is missing");
        let original = self.original_max_position_embeddings.unwrap_or(max_position_embeddings);
        Ok(match self.rope_type.as_deref().unwrap_or("default") {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear { factor: factor()? },
            "dynamic" => RopeScaling::Dynamic { factor: factor()? },
            "llama3" => RopeScaling::Llama3 {
                factor: factor()?,
                low_frequency_factor: self.low_freq_factor.context("`low_freq_factor` is missing")?,
                high_frequency_factor: self.high_freq_factor.context("`high_freq_factor` is missing")?,
                original,
            },
            "yarn" => self.yarn(original, max_position_embeddings),
            other => bail!(
                "`rope_type` is {other:?}, supported are \"default\", \"linear\", \"dynamic\", \"llama3\" and \"yarn\""
            ),
        })
    }

    fn yarn(&self, original: usize, max_position_embeddings: usize) -> RopeScaling {
        let longer = max_position_embeddings as f64 / original.max(1) as f64;
        let factor = self.factor.unwrap_or(longer);
        let growth = |scale: f64| {
            if factor <= 1.0 {
                1.0
            } else {
                0.1 * scale * factor.ln() + 1.0
            }
        };
        let nonzero = |value: Option<f64>| value.filter(|value| *value != 0.0);
        let inferred = match (nonzero(self.mscale), nonzero(self.mscale_all_dim)) {
            (Some(mscale), Some(all)) => growth(mscale) / growth(all),
            _ => growth(1.0),
        };
        RopeScaling::Yarn {
            factor,
            original,
            beta_fast: nonzero(self.beta_fast).unwrap_or(32.0),
            beta_slow: nonzero(self.beta_slow).unwrap_or(1.0),
            attention_factor: self.attention_factor.unwrap_or(inferred),
            truncate: self.truncate.unwrap_or(true),
        }
    }
}

impl RopeScaling {
    /// # Errors
    /// If a number is not what its kind can compute with.
    pub(super) fn check(&self) -> Result<()> {
        let positive = |name: &str, value: f64| {
            ensure!(
                value.is_finite() && value > 0.0,
                "`{name}` of the rotary settings is {value}, expected a positive number"
            );
            Ok(())
        };
        let stretches = |factor: f64| {
            ensure!(
                (1.0..=1e6).contains(&factor),
                "`factor` of the rotary settings is {factor}, expected at least 1 and no more than a million"
            );
            Ok(())
        };
        let original_is_some = |original: usize| {
            ensure!(
                original > 0,
                "`original_max_position_embeddings` of the rotary settings is 0, expected at least 1"
            );
            Ok(())
        };
        match *self {
            Self::Default => Ok(()),
            Self::Linear { factor } | Self::Dynamic { factor } => stretches(factor),
            Self::Llama3 {
                factor,
                low_frequency_factor,
                high_frequency_factor,
                original,
            } => {
                stretches(factor)?;
                original_is_some(original)?;
                positive("low_freq_factor", low_frequency_factor)?;
                ensure!(
                    high_frequency_factor > low_frequency_factor && high_frequency_factor.is_finite(),
                    "`high_freq_factor` of the rotary settings is {high_frequency_factor}, expected more than \
                     `low_freq_factor`, {low_frequency_factor}"
                );
                Ok(())
            }
            Self::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                attention_factor,
                ..
            } => {
                stretches(factor)?;
                original_is_some(original)?;
                positive("beta_fast", beta_fast)?;
                positive("beta_slow", beta_slow)?;
                positive("attention_factor", attention_factor)
            }
        }
    }
}
