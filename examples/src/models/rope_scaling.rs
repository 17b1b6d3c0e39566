//! Rotary frequencies beyond the length that a model was pre-trained with, as transformers' `modeling_rope_utils.py`.

use std::f64::consts::TAU;

/// How the rotary frequencies `theta^(-2i / head_dim)` are changed so that a model reads longer sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    #[default]
    Default,
    /// All are divided by `factor` (Chen et al. 2023, arXiv:2306.15595).
    Linear {
        /// How many times longer sequences are.
        factor: f64,
    },
    /// The base grows with the length of a sequence that is longer than `max_position_embeddings` (NTK-aware scaling).
    Dynamic {
        /// How fast it grows.
        factor: f64,
    },
    /// Llama 3.1's: long wavelengths are stretched, short ones kept, those between interpolated.
    Llama3 {
        /// How much long wavelengths are stretched.
        factor: f64,
        /// Wavelengths above `original / low_frequency_factor` are long.
        low_frequency_factor: f64,
        /// Wavelengths below `original / high_frequency_factor` are short.
        high_frequency_factor: f64,
        /// The length of pre-training, in tokens.
        original: usize,
    },
    /// YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp between kept and stretched frequencies, and larger scores.
    Yarn {
        /// How much slow frequencies are stretched.
        factor: f64,
        /// The length of pre-training, in tokens.
        original: usize,
        /// Rotations over that length from which on frequencies are kept.
        beta_fast: f64,
        /// Rotations over that length below which frequencies are stretched in full.
        beta_slow: f64,
        /// What queries and keys are multiplied by.
        attention_factor: f64,
        /// Whether the ends of the ramp are whole numbers of pairs.
        truncate: bool,
    },
}

impl RopeScaling {
    /// Returns the longest sequence that this is made for, in tokens.
    pub fn longest(&self, max_position_embeddings: usize) -> usize {
        let times = |factor: f64, length: usize| ((length as f64 * factor) as usize).max(max_position_embeddings);
        match *self {
            Self::Default | Self::Llama3 { .. } => max_position_embeddings,
            Self::Linear { factor } | Self::Dynamic { factor } => times(factor, max_position_embeddings),
            Self::Yarn { factor, original, .. } => times(factor, original),
        }
    }

    /// Returns the angle by which one position turns each of the `head_dim / 2` pairs, for sequences of `sequence` tokens,
    /// and what the turned elements are multiplied by.
    pub fn frequencies(
        &self,
        head_dim: usize,
        theta: f64,
        max_position_embeddings: usize,
        sequence: usize,
    ) -> (Vec<f64>, f64) {
        let powers_of = |theta: f64| {
            let pairs = 0..head_dim / 2;
            Vec::from_iter(pairs.map(|pair| theta.powf(-2.0 * pair as f64 / head_dim as f64)))
        };
        let kept = powers_of(theta);
        match *self {
            Self::Default => (kept, 1.0),
            Self::Linear { factor } => (kept.into_iter().map(|angle| angle / factor).collect(), 1.0),
            Self::Dynamic { factor } => {
                let dim = head_dim as f64;
                let ratio = sequence.max(max_position_embeddings) as f64 / max_position_embeddings as f64;
                let grown = theta * (factor * ratio - (factor - 1.0)).powf(dim / (dim - 2.0));
                (powers_of(grown), 1.0)
            }
            Self::Llama3 {
                factor,
                low_frequency_factor: low,
                high_frequency_factor: high,
                original,
            } => {
                let stretched = |angle: f64| {
                    let turns = original as f64 * angle / TAU;
                    if turns < low {
                        return angle / factor;
                    }
                    let share = ((turns - low) / (high - low)).min(1.0);
                    (1.0 - share) * angle / factor + share * angle
                };
                (kept.into_iter().map(stretched).collect(), 1.0)
            }
            Self::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate,
            } => {
                let dim = head_dim as f64;
                // The pair that turns so often over the length of pre-training.
                let pair_of = |turns: f64| dim * (original as f64 / (turns * TAU)).ln() / (2.0 * theta.ln());
                let (mut low, mut high) = (pair_of(beta_fast), pair_of(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dim - 1.0));
                if low == high {
                    high += 0.001;
                }
                let ramp = |(pair, angle): (usize, f64)| {
                    let share = ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    angle / factor * share + angle * (1.0 - share)
                };
                (kept.into_iter().enumerate().map(ramp).collect(), attention_factor)
            }
        }
    }
}
