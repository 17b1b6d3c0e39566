//! Between latents and the sequence: patches are cut out and projected, text is projected, and results are put together again.

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use sconce_core::nn::{Linear, linear};

use super::CogVideoXConfig;
use super::positions::{Grid, Remembered, sinusoids};

/// Projects text and patches to one sequence, and adds positions to it where they are not turned.
#[derive(Debug)]
pub(super) struct PatchEmbedding {
    /// A convolution's kernel [inner, channels, side, side] before version 1.5, then a matrix of the same order.
    weight: Tensor,
    bias: Option<Tensor>,
    text_proj: Linear,
    /// The table of the weights, [1, text + patches, inner]. diffusers calls it learned, and never trains it.
    table: Option<Tensor>,
    sinusoids: Remembered<Tensor>,
    config: CogVideoXConfig,
}

impl PatchEmbedding {
    pub(super) fn new(config: &CogVideoXConfig, vb: VarBuilder) -> Result<Self> {
        let (inner, side) = (config.inner_dim(), config.patch_size);
        let proj = vb.pp("proj");
        let (shape, has_bias) = match config.patch_size_t {
            None => (vec![inner, config.in_channels, side, side], config.patch_bias),
            Some(frames) => (vec![inner, config.in_channels * frames * side * side], true),
        };
        let init = candle_nn::init::DEFAULT_KAIMING_UNIFORM;
        let weight = proj.get_with_hints(shape, "weight", init)?;
        let bias = match has_bias {
            true => Some(proj.get_with_hints(inner, "bias", candle_nn::init::ZERO)?),
            false => None,
        };
        let table = match config.use_learned_positional_embeddings {
            true => Some(vb.get(
                (1, config.max_text_seq_length + patches_of_table(config), inner),
                "pos_embedding",
            )?),
            false => None,
        };
        Ok(Self {
            weight,
            bias,
            text_proj: linear(config.text_embed_dim, inner, vb.pp("text_proj"))?,
            table,
            sinusoids: Remembered::default(),
            config: config.clone(),
        })
    }

    /// Makes text [batch, tokens, width] and latents [batch, frames, channels, height, width] into a sequence [batch, tokens +
    /// patches, inner].
    pub(super) fn forward(&self, text: &Tensor, latents: &Tensor) -> Result<Tensor> {
        let grid = grid(&self.config, latents)?;
        let patches = cut(latents, self.config.patch_frames(), self.config.patch_size)?;
        let weight = self.weight.flatten_from(1)?;
        let patches = Linear::new(weight, self.bias.clone()).forward(&patches)?;
        let tokens = text.dim(1)?;
        let sequence = Tensor::cat(&[self.text_proj.forward(text)?, patches], 1)?;
        let positions = match &self.table {
            Some(table) => {
                self.expect_size_of_table(latents)?;
                // A shorter video takes the table's first frames, as the frames of a table come one after the other.
                table.narrow(1, 0, tokens + grid.patches())?.detach()
            }
            None if self.config.use_rotary_positional_embeddings => return Ok(sequence),
            None => {
                let make = || sinusoids(&self.config, grid, tokens, latents.device());
                self.sinusoids.get(grid, tokens, make)?
            }
        };
        sequence.broadcast_add(&positions.to_dtype(sequence.dtype())?)
    }

    fn expect_size_of_table(&self, latents: &Tensor) -> Result<()> {
        let (_, frames, _, height, width) = latents.dims5()?;
        let config = &self.config;
        let most = (config.sample_frames - 1) / config.temporal_compression_ratio + 1;
        if (height, width) != (config.sample_height, config.sample_width) || frames > most {
            candle_core::bail!(
                "latents of {frames} frames of {height}x{width} do not fit the model's table of positions, which is for {most} \
                 of {}x{}; encode videos of that size",
                config.sample_height,
                config.sample_width
            );
        }
        Ok(())
    }
}

/// Patches of the latents for which a table of positions was made.
fn patches_of_table(config: &CogVideoXConfig) -> usize {
    let frames = (config.sample_frames - 1) / config.temporal_compression_ratio + 1;
    let side = config.patch_size;
    frames * (config.sample_height / side) * (config.sample_width / side)
}

/// Returns the grid of patches that cover latents [batch, frames, channels, height, width].
///
/// # Errors
/// If they do not cover them.
pub(super) fn grid(config: &CogVideoXConfig, latents: &Tensor) -> Result<Grid> {
    let (_, frames, channels, height, width) = latents.dims5()?;
    let (side, depth) = (config.patch_size, config.patch_frames());
    if channels != config.in_channels {
        candle_core::bail!(
            "latents have {channels} channels, expected {} in [batch, frames, channels, height, width], got {:?}",
            config.in_channels,
            latents.dims()
        );
    }
    if !frames.is_multiple_of(depth) || !height.is_multiple_of(side) || !width.is_multiple_of(side) {
        candle_core::bail!(
            "latents of {frames} frames of {height}x{width} cannot be cut into patches of {depth} frames of {side}x{side}"
        );
    }
    Ok(Grid {
        frames: frames / depth,
        height: height / side,
        width: width / side,
    })
}

/// Cuts latents [batch, frames, channels, height, width] into patches [batch, patches, channels · depth · side²].
fn cut(latents: &Tensor, depth: usize, side: usize) -> Result<Tensor> {
    let (batch, frames, channels, height, width) = latents.dims5()?;
    let grid = [frames / depth, height / side, width / side];
    latents
        .reshape(vec![batch, grid[0], depth, channels, grid[1], side, grid[2], side])?
        .permute(vec![0, 1, 4, 6, 3, 2, 5, 7])?
        .contiguous()?
        .reshape((batch, grid.iter().product::<usize>(), channels * depth * side * side))
}

/// Puts patches [batch, patches, channels · depth · side²] together to latents [batch, frames, channels, height, width].
pub(super) fn join(patches: &Tensor, grid: Grid, depth: usize, side: usize) -> Result<Tensor> {
    let (batch, _, elements) = patches.dims3()?;
    let channels = elements / (depth * side * side);
    let Grid { frames, height, width } = grid;
    patches
        .reshape(vec![batch, frames, height, width, channels, depth, side, side])?
        .permute(vec![0, 1, 5, 4, 2, 6, 3, 7])?
        .contiguous()?
        .reshape((batch, frames * depth, channels, height * side, width * side))
}
