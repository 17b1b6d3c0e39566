//! Answers of the model as it is, for people to read.

use anyhow::{Context as _, Result};
use candle_core::{DType, Device, Tensor};
use sconce_core::{Accelerator, RandomState};
use sconce_examples::models::Llama;
use sconce_examples::text::{PromptFormat, SpecialTokens, TextEncoder};

/// What the model is asked, and how it answers.
pub(crate) struct Sampler {
    pub(crate) encoder: TextEncoder,
    pub(crate) special_tokens: SpecialTokens,
    /// How questions are asked; `None` continues a text.
    pub(crate) format: Option<PromptFormat>,
    pub(crate) prompts: Vec<String>,
    pub(crate) tokens: usize,
    pub(crate) temperature: f64,
    pub(crate) seed: u64,
}

impl Sampler {
    /// Returns the ids that the model is to go on from.
    pub(crate) fn encode(&self, prompt: &str) -> Result<Vec<i64>> {
        let (text, has_special_tokens) = match &self.format {
            Some(format) => format.ask(prompt)?,
            None => (prompt.to_owned(), false),
        };
        let ids = self.encoder.encode_text(&text, !has_special_tokens)?;
        anyhow::ensure!(!ids.is_empty(), "--sample_prompt {prompt:?} has no tokens");
        Ok(ids)
    }

    /// Answers a prompt; called by all ranks, since they gather parameters together. `step` and the seed decide what chance
    /// does: the same answer on any number of ranks.
    pub(crate) fn answer(&self, acc: &dyn Accelerator, model: &Llama, prompt: &str, step: u64) -> Result<String> {
        let mut ids = self.encode(prompt)?;
        let begin = ids.len();
        let mut random = RandomState {
            seed: self.seed.wrapping_add(step),
            draws: 0,
        };
        while ids.len() < begin + self.tokens {
            let tokens = Tensor::new(ids.as_slice(), acc.device())?.unsqueeze(0)?;
            let logits = acc.autocast(|| model.next_token_logits(&tokens))?;
            let logits = logits.squeeze(0)?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
            let own = self.choose(&logits.to_vec1::<f32>()?, &mut random)?;
            // Ranks on unlike machines may round unlike, and would part.
            let next = acc.broadcast_object(&own, 0)?;
            if self.special_tokens.stops.contains(&next) {
                break;
            }
            ids.push(next);
        }
        self.encoder.decode(&ids[begin..])
    }

    /// Takes the likeliest token, or draws one by `softmax(logits / temperature)`.
    fn choose(&self, logits: &[f32], random: &mut RandomState) -> Result<i64> {
        let likeliest = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
        let likeliest = likeliest.context("the model has no tokens")?;
        if self.temperature == 0.0 {
            return Ok(likeliest as i64);
        }
        let top = f64::from(logits[likeliest]);
        let weights = Vec::from_iter(
            logits
                .iter()
                .map(|logit| ((f64::from(*logit) - top) / self.temperature).exp()),
        );
        let key = random.during(RandomState::draw_key);
        random.draws += 1;
        // 53 bits are what an f64 between 0 and 1 holds.
        let mut left = (key >> 11) as f64 / (1u64 << 53) as f64 * weights.iter().sum::<f64>();
        for (id, weight) in weights.iter().enumerate() {
            left -= weight;
            if left < 0.0 {
                return Ok(id as i64);
            }
        }
        Ok(likeliest as i64)
    }
}
