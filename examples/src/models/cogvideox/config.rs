//! Turns the `config.json` of a CogVideoX transformer into plain, checked values.
//!
//! A setting that would change the result and is not implemented is an error, never ignored.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;

use crate::huggingface::ModelFolder;

/// Shape and constants of a CogVideoX transformer, checked to fit together.
///
/// Names and defaults are those of `CogVideoXTransformer3DModel` in diffusers.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct CogVideoXConfig {
    /// Attention heads of a block.
    pub num_attention_heads: usize,
    /// Width of one head, a multiple of 16.
    pub attention_head_dim: usize,
    /// Channels of the input: those of the latents, twice as many for image-to-video.
    pub in_channels: usize,
    /// Channels of the output: those of the latents.
    pub out_channels: usize,
    /// Whether the time step's sinusoids are cosines first.
    pub flip_sin_to_cos: bool,
    /// Taken from the number of frequencies of the time step's sinusoids.
    pub freq_shift: f64,
    /// Width of the time step's embedding.
    pub time_embed_dim: usize,
    /// Width of the embedding of the ofs input, where the model has one.
    pub ofs_embed_dim: Option<usize>,
    /// Width of the text encoder's output.
    pub text_embed_dim: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Whether the projections to queries, keys and values have biases.
    pub attention_bias: bool,
    /// Width of the latents for which positions are made.
    pub sample_width: usize,
    /// Height of the latents for which positions are made.
    pub sample_height: usize,
    /// Frames of the video, not of the latents, for which positions are made.
    pub sample_frames: usize,
    /// Side of a patch.
    pub patch_size: usize,
    /// Frames of a patch in version 1.5; patches of the versions before are within one frame.
    pub patch_size_t: Option<usize>,
    /// Frames of the video to a frame of the latents.
    pub temporal_compression_ratio: usize,
    /// Tokens of the text.
    pub max_text_seq_length: usize,
    /// Added to the variance in norms outside of attention.
    pub norm_eps: f64,
    /// Sinusoidal positions in space are divided by this.
    pub spatial_interpolation_scale: f64,
    /// Sinusoidal positions in time are divided by this.
    pub temporal_interpolation_scale: f64,
    /// Whether attention turns queries and keys by their position, instead of adding sinusoids to patches.
    pub use_rotary_positional_embeddings: bool,
    /// Whether a table of positions is part of the weights.
    pub use_learned_positional_embeddings: bool,
    /// Whether the patch projection of the versions before 1.5 has a bias.
    pub patch_bias: bool,
}

impl Default for CogVideoXConfig {
    fn default() -> Self {
        Self {
            num_attention_heads: 30,
            attention_head_dim: 64,
            in_channels: 16,
            out_channels: 16,
            flip_sin_to_cos: true,
            freq_shift: 0.0,
            time_embed_dim: 512,
            ofs_embed_dim: None,
            text_embed_dim: 4096,
            num_layers: 30,
            attention_bias: true,
            sample_width: 90,
            sample_height: 60,
            sample_frames: 49,
            patch_size: 2,
            patch_size_t: None,
            temporal_compression_ratio: 4,
            max_text_seq_length: 226,
            norm_eps: 1e-5,
            spatial_interpolation_scale: 1.875,
            temporal_interpolation_scale: 1.0,
            use_rotary_positional_embeddings: false,
            use_learned_positional_embeddings: false,
            patch_bias: true,
        }
    }
}

/// What must be as it is here, or the result is another.
#[derive(Deserialize)]
struct Fixed {
    _class_name: Option<String>,
    activation_fn: Option<String>,
    timestep_activation_fn: Option<String>,
    dropout: Option<f64>,
    norm_elementwise_affine: Option<bool>,
}

impl CogVideoXConfig {
    /// Reads the configuration of an opened model folder.
    ///
    /// # Errors
    /// As [`CogVideoXConfig::from_json`].
    pub fn from_model_folder(folder: &ModelFolder) -> Result<Self> {
        Self::from_json(&folder.config, &folder.config_path())
    }

    /// Reads the text of a `config.json`; `path` is only used to say where an error was found.
    ///
    /// # Errors
    /// If the text is not such a file, describes another model, asks for something that
    /// [`CogVideoXTransformer`](super::CogVideoXTransformer) does not implement, or holds sizes that do not fit together.
    pub fn from_json(text: &str, path: &Path) -> Result<Self> {
        let read = || -> Result<Self> {
            // The class first: another model's file need not have the fields of this one.
            serde_json::from_str::<Fixed>(text)?.check()?;
            let config: Self = serde_json::from_str(text)?;
            config.check()?;
            Ok(config)
        };
        read().with_context(|| format!("{}: cannot be used as a CogVideoX configuration", path.display()))
    }

    /// Width of the sequence inside the blocks.
    pub fn inner_dim(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Frames of a patch.
    pub fn patch_frames(&self) -> usize {
        self.patch_size_t.unwrap_or(1)
    }

    /// Whether the model takes the latents of an image beside the noisy ones.
    pub fn is_image_to_video(&self) -> bool {
        self.in_channels == 2 * self.out_channels
    }

    /// Checks that sizes fit together.
    ///
    /// # Errors
    /// If they do not.
    pub fn check(&self) -> Result<()> {
        /// Larger than any model's; what is larger would only fill memory.
        const LARGEST: usize = 1 << 20;
        for (name, value) in [
            ("num_attention_heads", self.num_attention_heads),
            ("attention_head_dim", self.attention_head_dim),
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels),
            ("time_embed_dim", self.time_embed_dim),
            ("ofs_embed_dim", self.ofs_embed_dim.unwrap_or(1)),
            ("text_embed_dim", self.text_embed_dim),
            ("num_layers", self.num_layers),
            ("sample_width", self.sample_width),
            ("sample_height", self.sample_height),
            ("sample_frames", self.sample_frames),
            ("patch_size", self.patch_size),
            ("patch_size_t", self.patch_frames()),
            ("temporal_compression_ratio", self.temporal_compression_ratio),
            ("max_text_seq_length", self.max_text_seq_length),
        ] {
            ensure!(
                (1..=LARGEST).contains(&value),
                "`{name}` is {value}, expected 1 to {LARGEST}"
            );
        }
        ensure!(
            self.attention_head_dim.is_multiple_of(16),
            "`attention_head_dim` is {}, expected a multiple of 16: positions in time, height and width turn a quarter and \
             three eighths twice of it, in pairs",
            self.attention_head_dim
        );
        ensure!(
            self.in_channels == self.out_channels || self.is_image_to_video(),
            "`in_channels` is {} and `out_channels` is {}, expected the same, or twice as many for image-to-video",
            self.in_channels,
            self.out_channels
        );
        ensure!(
            !(self.use_learned_positional_embeddings && self.patch_size_t.is_some()),
            "`use_learned_positional_embeddings` is true and `patch_size_t` is set: no model has both"
        );
        ensure!(
            self.use_rotary_positional_embeddings || self.patch_size_t.is_none(),
            "`use_rotary_positional_embeddings` is false and `patch_size_t` is set: no model is so"
        );
        for (name, value) in [
            ("norm_eps", self.norm_eps),
            ("spatial_interpolation_scale", self.spatial_interpolation_scale),
            ("temporal_interpolation_scale", self.temporal_interpolation_scale),
        ] {
            ensure!(
                value.is_finite() && value > 0.0,
                "`{name}` is {value}, expected a positive number"
            );
        }
        Ok(())
    }
}

impl Fixed {
    fn check(&self) -> Result<()> {
        let class = self._class_name.as_deref();
        ensure!(
            class == Some("CogVideoXTransformer3DModel"),
            "`_class_name` is {}, expected \"CogVideoXTransformer3DModel\"; choose the folder `transformer` of a CogVideoX \
             pipeline",
            class.map_or("missing".to_owned(), |found| format!("{found:?}")),
        );
        for (name, found, supported) in [
            ("activation_fn", &self.activation_fn, "gelu-approximate"),
            ("timestep_activation_fn", &self.timestep_activation_fn, "silu"),
        ] {
            if let Some(found) = found {
                ensure!(found == supported, "`{name}` is {found:?}, supported is {supported:?}");
            }
        }
        let dropout = self.dropout.unwrap_or(0.0);
        ensure!(dropout == 0.0, "`dropout` is {dropout}, supported is 0");
        ensure!(
            self.norm_elementwise_affine != Some(false),
            "`norm_elementwise_affine` is false, supported is true"
        );
        Ok(())
    }
}
