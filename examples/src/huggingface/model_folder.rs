//! Finds the files of a model folder and checks that they are complete.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use sconce_core::ForeignWeights;
use sconce_core::export::Library;

use super::safetensors_header::read_safetensors_header;
use super::shard_index::ShardIndex;

pub(super) const CONFIG_FILE: &str = "config.json";
const TOKENIZER_FILE: &str = "tokenizer.json";

/// The checked files of a model folder.
#[derive(Clone, Debug)]
pub struct ModelFolder {
    /// The folder itself.
    pub directory: PathBuf,
    /// Text of `config.json`.
    pub config: String,
    /// The safetensors files that together hold the weights, sorted by name.
    pub weights: Vec<PathBuf>,
    /// `tokenizer.json`, where the folder has one.
    pub tokenizer: Option<PathBuf>,
}

impl ModelFolder {
    /// Opens a folder with `config.json` and either `model.safetensors` or shards listed in
    /// `model.safetensors.index.json`; of diffusers', `diffusion_pytorch_model` takes the place of `model`.
    ///
    /// Reads the headers of the weight files, not the weights.
    ///
    /// # Errors
    /// If a file is missing, a weight file is truncated or malformed, or the index names a file outside the folder or
    /// lists other tensors than its shards hold.
    pub fn open(directory: &Path) -> Result<Self> {
        let folder = Self::open_without_weights(directory)?;
        Ok(Self {
            weights: find_weights(directory)?,
            ..folder
        })
    }

    /// Opens a folder for what describes the model and its text, to begin with other weights; [`ModelFolder::weights`] is empty.
    ///
    /// # Errors
    /// If there is no `config.json`.
    pub fn open_without_weights(directory: &Path) -> Result<Self> {
        let config_path = directory.join(CONFIG_FILE);
        let config = fs::read_to_string(&config_path).with_context(|| {
            format!(
                "{}: cannot be read; a model folder needs a {CONFIG_FILE}",
                config_path.display()
            )
        })?;
        let tokenizer = Some(directory.join(TOKENIZER_FILE)).filter(|path| path.is_file());
        Ok(Self {
            directory: directory.to_owned(),
            config,
            weights: Vec::new(),
            tokenizer,
        })
    }

    /// Path of `config.json`, for messages about what it holds.
    pub fn config_path(&self) -> PathBuf {
        self.directory.join(CONFIG_FILE)
    }
}

/// Prefers the single file, as transformers does.
fn find_weights(directory: &Path) -> Result<Vec<PathBuf>> {
    for library in [Library::Transformers, Library::Diffusers] {
        let single = directory.join(library.single_file());
        if single.is_file() {
            read_safetensors_header(&single)?;
            return Ok(vec![single]);
        }
        let index = directory.join(library.index_file());
        if index.is_file() {
            return ShardIndex::read(&index)?.check_shards(directory);
        }
    }
    if let Some(foreign) = ForeignWeights::find(directory) {
        bail!("{foreign}");
    }
    bail!(
        "{}: has no weights, expected model.safetensors or model.safetensors.index.json (of diffusers', \
         diffusion_pytorch_model) beside {CONFIG_FILE}",
        directory.display()
    )
}
