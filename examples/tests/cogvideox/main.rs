//! The CogVideoX transformer against diffusers, and trained alike however its state is sharded.

mod config;
mod sharding;
mod variants;
#[path = "../worlds/mod.rs"]
mod worlds;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor, safetensors};
use sconce_examples::huggingface::ModelFolder;
use sconce_examples::models::{CogVideoXConfig, CogVideoXTransformer, VideoInput};

/// What diffusers was asked: the five layouts of the models that there are.
pub(crate) const VARIANTS: [&str; 5] = ["sincos", "sincos_resized", "rotary", "i2v_learned", "v15"];

pub(crate) fn folder(variant: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/tiny-cogvideox")
        .join(variant)
}

/// A variant's model folder, configuration and recorded tensors.
pub(crate) struct Variant {
    pub(crate) folder: ModelFolder,
    pub(crate) config: CogVideoXConfig,
    pub(crate) io: HashMap<String, Tensor>,
}

impl Variant {
    pub(crate) fn open(name: &str) -> Self {
        let folder = ModelFolder::open(&folder(name)).unwrap();
        let config = CogVideoXConfig::from_model_folder(&folder).unwrap();
        let io = safetensors::load(folder.directory.join("io.safetensors"), &Device::Cpu).unwrap();
        Self { folder, config, io }
    }

    /// What the model makes of the recorded inputs, which are replaced where they are given.
    pub(crate) fn forward(&self, model: &CogVideoXTransformer, latents: &Tensor, text: &Tensor) -> Tensor {
        let ofs = self.io.get("ofs").map(|ofs| ofs.to_dtype(DType::F64).unwrap());
        let input = VideoInput {
            latents,
            text,
            timestep: &self.io["timestep"],
            ofs: ofs.map(|ofs| ofs.to_vec1::<f64>().unwrap()[0]),
        };
        model.forward(input).unwrap()
    }

    /// The recorded loss: the mean of squares.
    pub(crate) fn loss(&self, output: &Tensor) -> Tensor {
        let target = self.io["target"].to_dtype(output.dtype()).unwrap();
        (output - target).unwrap().sqr().unwrap().mean_all().unwrap()
    }
}
