//! Training data that has been through the video and text encoders: latents and prompt embeddings in safetensors shards.
//!
//! A folder of `*.safetensors`, in the order of their names. Each holds, for any number `n` of samples in f32, bf16 or f16:
//!
//! | tensor | shape | what |
//! | --- | --- | --- |
//! | `latents` | [n, channels, frames, height, width] | a sample of the video encoder's distribution times its scaling factor |
//! | `prompt_embeds` | [n, tokens, width] | the text encoder's output, padded |
//! | `image_latents` | [n, channels, height, width] | for image-to-video: of the first frame, noised before it was encoded |
//!
//! `xtask/peers/encode_cogvideox.py` makes them with diffusers.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use candle_core::{DType, Device, Tensor};
use sconce_core::Dataset;
use sconce_core::data::{DataError, SafetensorsRows};

/// Encoded videos in shards.
#[derive(Debug)]
pub struct VideoSamples {
    shards: Vec<SafetensorsRows>,
    /// The number of samples up to the end of each shard.
    ends: Vec<usize>,
    /// Shapes of one sample: of latents, text and, if there are any, image latents.
    shapes: Vec<Vec<usize>>,
}

/// A batch of samples, all floats in f32.
#[derive(Debug, Clone)]
pub struct VideoBatch {
    /// The numbers of the samples.
    pub samples: Vec<u64>,
    /// Latents [batch, frames, channels, height, width].
    pub latents: Tensor,
    /// Text [batch, tokens, width].
    pub text: Tensor,
    /// Latents of images [batch, channels, height, width].
    pub images: Option<Tensor>,
}

impl VideoSamples {
    /// Opens a folder of shards; nothing but headers is read. `with_images` says whether image latents are needed.
    ///
    /// # Errors
    /// If there are no shards, one cannot be read or lacks a tensor, or samples differ in shape.
    pub fn open(folder: &Path, with_images: bool) -> Result<Self> {
        let mut paths = shard_paths(folder)?;
        paths.sort();
        ensure!(
            !paths.is_empty(),
            "{}: has no *.safetensors files; xtask/peers/encode_cogvideox.py makes them from videos and captions",
            folder.display()
        );
        let mut names = vec!["latents", "prompt_embeds"];
        names.extend(with_images.then_some("image_latents"));
        let (mut shards, mut ends, mut shapes) = (Vec::new(), Vec::new(), Vec::new());
        for path in &paths {
            let open = SafetensorsRows::open(path, &names, 1).map_err(anyhow::Error::from_boxed);
            let shard = open.with_context(|| match with_images {
                true => "image-to-video needs image_latents beside latents and prompt_embeds",
                false => "text-to-video needs latents and prompt_embeds",
            })?;
            let found = Vec::from_iter(shard.row_shapes().map(<[usize]>::to_vec));
            if shapes.is_empty() {
                check_shapes(path, &found)?;
                shapes = found;
            } else {
                ensure!(
                    found == shapes,
                    "{}: has samples of the shapes {found:?}, expected {shapes:?} as in {}; encode all videos at one \
                     resolution",
                    path.display(),
                    paths[0].display()
                );
            }
            ends.push(ends.last().unwrap_or(&0) + shard.len());
            shards.push(shard);
        }
        let samples = Self { shards, ends, shapes };
        ensure!(!samples.is_empty(), "{}: its shards have no samples", folder.display());
        Ok(samples)
    }

    /// Returns frames, channels, height and width of the latents of a sample.
    pub fn latent_shape(&self) -> [usize; 4] {
        let shape = &self.shapes[0];
        [shape[1], shape[0], shape[2], shape[3]]
    }

    /// Returns tokens and width of the text of a sample.
    pub fn text_shape(&self) -> [usize; 2] {
        [self.shapes[1][0], self.shapes[1][1]]
    }

    /// Reads one sample's tensors.
    fn sample(&self, number: usize) -> Result<Vec<Tensor>, DataError> {
        let shard = self.ends.partition_point(|end| *end <= number);
        let first = if shard == 0 { 0 } else { self.ends[shard - 1] };
        self.shards[shard].batch(&[number - first], &Device::Cpu)
    }
}

impl Dataset for VideoSamples {
    type Batch = VideoBatch;

    fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn batch(&self, samples: &[usize], device: &Device) -> Result<VideoBatch, DataError> {
        let rows = samples.iter().map(|sample| self.sample(*sample));
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        let joined = |tensor: usize| {
            let rows = Vec::from_iter(rows.iter().map(|row| &row[tensor]));
            Tensor::cat(&rows, 0)?.to_dtype(DType::F32)?.to_device(device)
        };
        Ok(VideoBatch {
            samples: samples.iter().map(|sample| *sample as u64).collect(),
            latents: joined(0)?.transpose(1, 2)?.contiguous()?,
            text: joined(1)?,
            images: if self.shapes.len() > 2 { Some(joined(2)?) } else { None },
        })
    }
}

fn shard_paths(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("{}: cannot be listed", folder.display()))?;
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry
            .with_context(|| format!("{}: cannot be listed", folder.display()))?
            .path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            paths.push(path);
        }
    }
    Ok(paths)
}

fn check_shapes(path: &Path, shapes: &[Vec<usize>]) -> Result<()> {
    let axes = [
        "latents [n, channels, frames, height, width]",
        "prompt_embeds [n, tokens, width]",
        "image_latents [n, channels, height, width]",
    ];
    for ((shape, rank), axes) in shapes.iter().zip([4, 2, 3]).zip(axes) {
        ensure!(
            shape.len() == rank && !shape.contains(&0),
            "{}: samples have the shape {shape:?}, expected {axes}",
            path.display()
        );
    }
    if let [latents, _, image] = shapes {
        let expected = [latents[0], latents[2], latents[3]];
        ensure!(
            image[..] == expected,
            "{}: images have latents of shape {image:?}, expected {expected:?} as the videos",
            path.display()
        );
    }
    Ok(())
}
