//! Rotary tables of the length that is used: a model that reads 131072 positions is rarely trained on them.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor, bail};
use sconce_core::nn::RotaryEmbedding;

use super::LlamaConfig;
use super::rope_scaling::RopeScaling;

/// Makes [`RotaryEmbedding`]s for the lengths of sequences, and keeps the last.
#[derive(Debug, Clone)]
pub(super) struct RotaryTables {
    scaling: RopeScaling,
    head_dim: usize,
    theta: f64,
    max_position_embeddings: usize,
    dtype: DType,
    device: Device,
    last: Arc<Mutex<Option<Made>>>,
}

#[derive(Debug, Clone)]
struct Made {
    /// The length on which the frequencies depend.
    stretched_for: usize,
    embedding: RotaryEmbedding,
}

impl RotaryTables {
    /// `dtype` and `device` are those of queries and keys.
    pub(super) fn new(config: &LlamaConfig, dtype: DType, device: &Device) -> Self {
        Self {
            scaling: config.rope_scaling,
            head_dim: config.head_dim,
            theta: config.rope_theta,
            max_position_embeddings: config.max_position_embeddings,
            dtype,
            device: device.clone(),
            last: Arc::default(),
        }
    }

    /// Returns the embedding for sequences of `sequence` tokens.
    ///
    /// # Errors
    /// If that is longer than the model reads; failures of candle.
    pub(super) fn for_sequence(&self, sequence: usize) -> Result<RotaryEmbedding> {
        let longest = self.scaling.longest(self.max_position_embeddings);
        if sequence > longest {
            bail!(
                "the sequences have {sequence} tokens, expected at most {longest}, for which the model is configured"
            );
        }
        let stretched_for = match self.scaling {
            RopeScaling::Dynamic { .. } => sequence.max(self.max_position_embeddings),
            _ => self.max_position_embeddings,
        };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(made) = last.as_ref()
            && made.stretched_for == stretched_for
            && made.embedding.max_positions() >= sequence
        {
            return Ok(made.embedding.clone());
        }
        // A power of two, so that sequences that grow token by token do not make tables for each.
        let positions = sequence.next_power_of_two().min(longest);
        let embedding = self.make(positions, stretched_for)?;
        *last = Some(Made {
            stretched_for,
            embedding: embedding.clone(),
        });
        Ok(embedding)
    }

    fn make(&self, positions: usize, stretched_for: usize) -> Result<RotaryEmbedding> {
        let (frequencies, factor) =
            self.scaling
                .frequencies(self.head_dim, self.theta, self.max_position_embeddings, stretched_for);
        // Tables are f32 for 16 bits too: angles are not rounded.
        let dtype = if self.dtype == DType::F64 {
            DType::F64
        } else {
            DType::F32
        };
        let table = |function: fn(f64) -> f64| {
            let angles =
                (0..positions).flat_map(|position| frequencies.iter().map(move |angle| position as f64 * angle));
            let values = Vec::from_iter(angles.map(|angle| factor * function(angle)));
            Tensor::from_vec(values, (positions, frequencies.len()), &Device::Cpu)?
                .to_dtype(dtype)?
                .to_device(&self.device)
        };
        RotaryEmbedding::from_tables(table(f64::cos)?, table(f64::sin)?)
    }
}
