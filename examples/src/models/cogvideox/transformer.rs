//! The whole model: noisy latents, text and a time step in, the prediction for the latents out.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use sconce_core::nn::{LayerNorm, Linear, RotaryEmbedding, adaptive_layer_norm, layer_norm, linear};
use sconce_core::{ParameterSet, Unit, unit_of_class};

use super::block::{Block, split};
use super::patches::{PatchEmbedding, grid, join};
use super::positions::{Remembered, rotary};
use super::time_embedding::TimeEmbedding;
use super::{Adapters, CogVideoXConfig};

/// The name of the table of positions that image-to-video models have in their weights.
const TABLE_NAME: &str = "patch_embed.pos_embedding";

/// The CogVideoX transformer.
#[derive(Debug)]
pub struct CogVideoXTransformer {
    patch_embed: Unit<PatchEmbedding>,
    time_embedding: TimeEmbedding,
    ofs_embedding: Option<TimeEmbedding>,
    blocks: Vec<Unit<Block>>,
    norm_final: LayerNorm,
    norm_out: Linear,
    norm_out_norm: LayerNorm,
    proj_out: Linear,
    rotary: Remembered<RotaryEmbedding>,
    config: CogVideoXConfig,
}

/// What the model computes from; all but `timestep` in the dtype of the parameters.
#[derive(Debug, Clone, Copy)]
pub struct VideoInput<'a> {
    /// Noisy latents [batch, frames, channels, height, width]; for image-to-video the channels of the image's come behind.
    pub latents: &'a Tensor,
    /// The text encoder's output [batch, tokens, text_embed_dim].
    pub text: &'a Tensor,
    /// Time steps \[batch\], integers.
    pub timestep: &'a Tensor,
    /// The ofs input of models that have one.
    pub ofs: Option<f64>,
}

impl CogVideoXTransformer {
    /// Creates the model with parameters named as in diffusers' files (`patch_embed.proj.weight`,
    /// `transformer_blocks.0.attn1.to_q.weight`, ...), and with adapters beside layers where they are asked for.
    ///
    /// Where the weights have a table of positions, it must not be trained: [`CogVideoXTransformer::constants`].
    ///
    /// # Errors
    /// If `vb` has no such parameter or has it with another shape.
    pub fn new(config: &CogVideoXConfig, adapters: Option<&Adapters>, vb: VarBuilder) -> Result<Self> {
        let inner = config.inner_dim();
        let embed = |vb: VarBuilder<'_>| PatchEmbedding::new(config, vb);
        let patch_embed = unit_of_class(vb.clone(), "patch_embed", "CogVideoXPatchEmbed", embed)?;
        let time_embedding = TimeEmbedding::new(inner, config.time_embed_dim, config, vb.pp("time_embedding"))?;
        let ofs_embedding = match config.ofs_embed_dim {
            Some(width) => Some(TimeEmbedding::new(width, width, config, vb.pp("ofs_embedding"))?),
            None => None,
        };
        let block = |index: usize| {
            let build = |vb: VarBuilder<'_>| Block::new(config, adapters, vb);
            unit_of_class(vb.pp("transformer_blocks"), &index.to_string(), "CogVideoXBlock", build)
        };
        let elements = config.out_channels * config.patch_frames() * config.patch_size.pow(2);
        Ok(Self {
            patch_embed,
            time_embedding,
            ofs_embedding,
            blocks: (0..config.num_layers).map(block).collect::<Result<_>>()?,
            norm_final: layer_norm(inner, config.norm_eps, vb.pp("norm_final"))?,
            norm_out: linear(config.time_embed_dim, 2 * inner, vb.pp("norm_out.linear"))?,
            norm_out_norm: layer_norm(inner, config.norm_eps, vb.pp("norm_out.norm"))?,
            proj_out: linear(inner, elements, vb.pp("proj_out"))?,
            rotary: Remembered::default(),
            config: config.clone(),
        })
    }

    /// Returns the set of parameters that are never trained: the table of positions.
    pub fn constants() -> ParameterSet {
        ParameterSet::matching(|info| info.name == TABLE_NAME)
    }

    /// Returns the configuration that the model was made from.
    pub fn config(&self) -> &CogVideoXConfig {
        &self.config
    }

    /// Predicts [batch, frames, out_channels, height, width].
    ///
    /// # Errors
    /// If the latents cannot be cut into patches or shapes do not fit, or the ofs input is missing or none is expected.
    pub fn forward(&self, input: VideoInput<'_>) -> Result<Tensor> {
        let VideoInput {
            latents,
            text,
            timestep,
            ofs,
        } = input;
        let (dtype, device) = (latents.dtype(), latents.device());
        let grid = grid(&self.config, latents)?;
        let tokens = text.dim(1)?;
        let time = self.time_embedding.forward(timestep, dtype)?;
        let time = match (&self.ofs_embedding, ofs) {
            (Some(embedding), Some(ofs)) => {
                let ofs = Tensor::full(ofs as f32, 1, device)?;
                time.broadcast_add(&embedding.forward(&ofs, dtype)?)?
            }
            (None, None) => time,
            (Some(_), None) => candle_core::bail!("this model needs an ofs input; 2.0 is what it was trained with"),
            (None, Some(_)) => candle_core::bail!("this model has no ofs input"),
        };
        let rotary = match self.config.use_rotary_positional_embeddings {
            true => {
                let make = || rotary(&self.config, grid, tokens, device);
                Some(self.rotary.get(grid, tokens, make)?)
            }
            false => None,
        };
        let inputs = (text.clone(), latents.clone());
        let mut sequence = self
            .patch_embed
            .run(inputs, |embed, (text, latents)| embed.forward(&text, &latents))?;
        for block in &self.blocks {
            let rotary = rotary.clone();
            sequence = block.run((sequence, time.clone()), move |block, (sequence, time)| {
                block.forward(&sequence, &time, tokens, rotary.as_ref())
            })?;
        }
        let (_, video) = split(&self.norm_final.forward(&sequence)?, tokens)?;
        let modulation = self.norm_out.forward(&time.silu()?)?.chunk(2, 1)?;
        let video = adaptive_layer_norm(&self.norm_out_norm, &video, &modulation[1], &modulation[0])?;
        let patches = self.proj_out.forward(&video)?;
        join(&patches, grid, self.config.patch_frames(), self.config.patch_size)
    }
}
