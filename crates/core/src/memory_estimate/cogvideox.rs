//! The transformer of CogVideoX as shapes, from diffusers' configuration of it.

use super::activations::{Activations, PartActivations};
use super::model_shape::{ShapedParameter, flag, optional_size, size};
use super::workload::{ComputeDevice, Workload};
use serde_json::{Map, Value};

/// The sizes of a `CogVideoXTransformer3DModel`, with diffusers' names and defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CogVideoXShape {
    /// Number of heads.
    pub num_attention_heads: usize,
    /// Width of a head.
    pub attention_head_dim: usize,
    /// Channels of the latents, with those of an image that is given.
    pub in_channels: usize,
    /// Channels that are predicted.
    pub out_channels: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Width of the time embedding.
    pub time_embed_dim: usize,
    /// Width of the second embedding that version 1.5 has for image to video.
    pub ofs_embed_dim: Option<usize>,
    /// Width of the text encoder's embeddings.
    pub text_embed_dim: usize,
    /// Side of a patch.
    pub patch_size: usize,
    /// Frames of a patch, in version 1.5.
    pub patch_size_t: Option<usize>,
    /// Whether patches have a bias.
    pub patch_bias: bool,
    /// Whether queries, keys and values have biases.
    pub attention_bias: bool,
    /// Whether norms have parameters.
    pub norm_elementwise_affine: bool,
    /// Whether positions are learned.
    pub use_learned_positional_embeddings: bool,
    /// Frames of the video, rows and columns of the latents, and how many frames become one.
    pub sample: [usize; 4],
    /// Tokens of the text.
    pub max_text_seq_length: usize,
}

impl CogVideoXShape {
    pub(super) fn read(object: &Map<String, Value>) -> Result<Self, String> {
        let or = |key: &str, default: usize| Ok::<_, String>(optional_size(object, key)?.unwrap_or(default));
        Ok(Self {
            num_attention_heads: size(object, "num_attention_heads")?,
            attention_head_dim: size(object, "attention_head_dim")?,
            in_channels: or("in_channels", 16)?,
            out_channels: or("out_channels", 16)?,
            num_layers: size(object, "num_layers")?,
            time_embed_dim: or("time_embed_dim", 512)?,
            ofs_embed_dim: optional_size(object, "ofs_embed_dim")?,
            text_embed_dim: or("text_embed_dim", 4096)?,
            patch_size: or("patch_size", 2)?,
            patch_size_t: optional_size(object, "patch_size_t")?,
            patch_bias: flag(object, "patch_bias", true)?,
            attention_bias: flag(object, "attention_bias", true)?,
            norm_elementwise_affine: flag(object, "norm_elementwise_affine", true)?,
            use_learned_positional_embeddings: flag(object, "use_learned_positional_embeddings", false)?,
            sample: [
                or("sample_frames", 49)?,
                or("sample_height", 60)?,
                or("sample_width", 90)?,
                or("temporal_compression_ratio", 4)?,
            ],
            max_text_seq_length: or("max_text_seq_length", 226)?,
        })
    }

    fn width(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Tokens of the video: latent frames, rows and columns in patches.
    fn video_tokens(&self) -> usize {
        let [frames, height, width, compression] = self.sample;
        let latent_frames = (frames - 1) / compression + 1;
        let frames = latent_frames.div_ceil(self.patch_size_t.unwrap_or(1));
        frames * (height / self.patch_size) * (width / self.patch_size)
    }

    /// Returns the tokens of a sample: of text and of the video of the configured size.
    pub(super) fn default_sequence(&self) -> usize {
        self.video_tokens() + self.max_text_seq_length
    }

    /// Returns the parameters; blocks are units, and so is every module outside of them.
    pub(super) fn parameters(&self) -> Vec<ShapedParameter> {
        let (width, time) = (self.width(), self.time_embed_dim);
        let mut parameters: Vec<ShapedParameter> = Vec::new();
        let mut add = |unit: usize, name: String, shape: Vec<usize>| {
            let units = vec![unit];
            parameters.push(ShapedParameter { name, shape, units });
        };
        let linear = |add: &mut dyn FnMut(String, Vec<usize>), name: &str, rows: usize, columns: usize, bias: bool| {
            add(format!("{name}.weight"), vec![rows, columns]);
            if bias {
                add(format!("{name}.bias"), vec![rows]);
            }
        };
        let norm = |add: &mut dyn FnMut(String, Vec<usize>), name: &str, width: usize| {
            if self.norm_elementwise_affine {
                add(format!("{name}.weight"), vec![width]);
                add(format!("{name}.bias"), vec![width]);
            }
        };
        let patch = self.patch_size;
        let mut first = |name: String, shape: Vec<usize>| add(0, name, shape);
        match self.patch_size_t {
            None => first(
                "patch_embed.proj.weight".into(),
                vec![width, self.in_channels, patch, patch],
            ),
            Some(frames) => {
                let columns = self.in_channels * patch * patch * frames;
                first("patch_embed.proj.weight".into(), vec![width, columns]);
            }
        }
        // diffusers' layer for patches of several frames has a bias whatever the configuration says.
        if self.patch_bias || self.patch_size_t.is_some() {
            first("patch_embed.proj.bias".into(), vec![width]);
        }
        linear(&mut first, "patch_embed.text_proj", width, self.text_embed_dim, true);
        if self.use_learned_positional_embeddings {
            let tokens = self.default_sequence();
            first("patch_embed.pos_embedding".into(), vec![1, tokens, width]);
        }
        linear(&mut first, "time_embedding.linear_1", time, width, true);
        linear(&mut first, "time_embedding.linear_2", time, time, true);
        if let Some(ofs) = self.ofs_embed_dim {
            linear(&mut first, "ofs_embedding.linear_1", ofs, ofs, true);
            linear(&mut first, "ofs_embedding.linear_2", ofs, ofs, true);
        }
        for block in 0..self.num_layers {
            let mut of_block =
                |name: String, shape: Vec<usize>| add(block + 1, format!("transformer_blocks.{block}.{name}"), shape);
            let add = &mut of_block;
            for name in ["norm1", "norm2"] {
                linear(add, &format!("{name}.linear"), 6 * width, time, true);
                norm(add, &format!("{name}.norm"), width);
            }
            // Norms of queries and keys have parameters always.
            for name in ["attn1.norm_q", "attn1.norm_k"] {
                add(format!("{name}.weight"), vec![self.attention_head_dim]);
                add(format!("{name}.bias"), vec![self.attention_head_dim]);
            }
            for name in ["to_q", "to_k", "to_v"] {
                linear(add, &format!("attn1.{name}"), width, width, self.attention_bias);
            }
            linear(add, "attn1.to_out.0", width, width, true);
            linear(add, "ff.net.0.proj", 4 * width, width, true);
            linear(add, "ff.net.2", width, 4 * width, true);
        }
        let mut last = |name: String, shape: Vec<usize>| add(self.num_layers + 1, name, shape);
        norm(&mut last, "norm_final", width);
        linear(&mut last, "norm_out.linear", 2 * width, time, true);
        norm(&mut last, "norm_out.norm", width);
        let predicted = self.out_channels * patch * patch * self.patch_size_t.unwrap_or(1);
        linear(&mut last, "proj_out", predicted, width, true);
        parameters
    }

    /// Counts what a forward keeps and a backward needs, as if every op of a block kept its result: the model's layers may keep
    /// less.
    pub(super) fn activations(&self, workload: &Workload, sequence: usize) -> Activations {
        let tokens = (workload.batch * sequence) as u64;
        let bytes = workload.dtype().size_in_bytes() as u64;
        let hidden = tokens * self.width() as u64 * bytes;
        let heads = tokens * self.num_attention_heads as u64;
        // Two norms, modulated, gated and added: 8. Queries, keys and values with their biases: 6, normed: 4, turned: 2;
        // attended and put together: 2, projected: 2. The inner layer is four times as wide: projected, with its bias,
        // activated; and back: 2.
        let mut kept = (8 + 6 + 4 + 2 + 2 + 2 + 3 * 4 + 2) * hidden + heads * 8;
        if workload.computes_on == ComputeDevice::Cuda {
            kept += heads * sequence as u64 * (4 * 4 + bytes);
        }
        let weight = (4 * self.width() * self.width()) as u64 * bytes;
        let block = PartActivations {
            count: self.num_layers,
            input: hidden,
            output: hidden,
            kept,
            backward: (5 * 4 * hidden + 2 * hidden).max(4 * hidden + 2 * hidden + 3 * weight),
        };
        Activations {
            parts: vec![block],
            outside: 6 * hidden,
            outside_backward: 4 * hidden,
            // Sines and cosines of the video's positions, f32.
            constants: (self.video_tokens() * self.attention_head_dim) as u64 * 4 * 2,
        }
    }
}
