//! Where a model's shapes are read from: whatever a user has of it.

use super::{EstimateError, ModelShape};
use crate::Checkpoint;
use crate::export::Library;
use sconce_zero::{ForeignWeights, WeightFiles};
use std::fs;
use std::path::{Path, PathBuf};

const CONFIG_FILE: &str = "config.json";
/// The part of a diffusers pipeline that is trained.
const TRANSFORMER_FOLDER: &str = "transformer";

impl ModelShape {
    /// Reads the shapes of a model: from a folder of transformers' or diffusers' or its `config.json`, from a safetensors file or
    /// a folder of them, of which the headers are read, or from a checkpoint of Sconce's.
    ///
    /// # Errors
    /// [`EstimateError`] when there is nothing of the kind, or it is damaged.
    pub fn open(path: &Path) -> Result<Self, EstimateError> {
        if !path.exists() {
            return Err(EstimateError::Missing(path.to_owned()));
        }
        if path.is_dir() {
            return open_folder(path);
        }
        let extension = path.extension().and_then(|extension| extension.to_str());
        match extension {
            Some("safetensors") => of_weight_files(&[path.to_owned()]),
            Some("json") => Self::from_config(&read(path)?, path),
            _ => Err(EstimateError::NoModel {
                path: path.to_owned(),
                reason: match ForeignWeights::find(path) {
                    Some(foreign) => foreign.to_string(),
                    None => "expected a config.json or a .safetensors file".to_owned(),
                },
            }),
        }
    }
}

fn open_folder(folder: &Path) -> Result<ModelShape, EstimateError> {
    let pipeline = folder.join(TRANSFORMER_FOLDER);
    let config = folder.join(CONFIG_FILE);
    if !config.is_file() && pipeline.join(CONFIG_FILE).is_file() {
        return open_folder(&pipeline);
    }
    let weights = weight_files(folder)?;
    if config.is_file() {
        let known = ModelShape::from_config(&read(&config)?, &config);
        // Of another architecture the weights tell enough.
        return match known {
            Err(EstimateError::Config { .. }) if !weights.is_empty() => of_weight_files(&weights),
            known => known,
        };
    }
    let as_checkpoint = || -> Result<ModelShape, EstimateError> {
        let checkpoint = Checkpoint::open(folder)?;
        let parameters = checkpoint.models().into_iter().flat_map(|model| model.parameters);
        Ok(ModelShape::from_weights(
            parameters.map(|tensor| (tensor.name, tensor.shape)),
        ))
    };
    match as_checkpoint() {
        Ok(model) => Ok(model),
        Err(_) if !weights.is_empty() => of_weight_files(&weights),
        Err(error) => match ForeignWeights::find(folder) {
            Some(foreign) => Err(EstimateError::NoModel {
                path: folder.to_owned(),
                reason: foreign.to_string(),
            }),
            None if holds_nothing(folder) => Err(EstimateError::NoModel {
                path: folder.to_owned(),
                reason: "has no config.json, no safetensors files and no checkpoint".to_owned(),
            }),
            None => Err(error),
        },
    }
}

/// Says whether a folder has neither files nor folders of a checkpoint's.
fn holds_nothing(folder: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    !names.any(|name| name.starts_with("checkpoint_") || name == "index.json")
}

/// Returns the weight files of a folder: the one of all tensors where there is one, as transformers does, else all.
fn weight_files(folder: &Path) -> Result<Vec<PathBuf>, EstimateError> {
    for library in [Library::Transformers, Library::Diffusers] {
        let single = folder.join(library.single_file());
        if single.is_file() {
            return Ok(vec![single]);
        }
    }
    let cannot_read = |source| EstimateError::Read {
        path: folder.to_owned(),
        source,
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(cannot_read)? {
        let path = entry.map_err(cannot_read)?.path();
        let is_weights = path.extension().is_some_and(|extension| extension == "safetensors");
        files.extend((is_weights && path.is_file()).then_some(path));
    }
    files.sort();
    Ok(files)
}

fn of_weight_files(paths: &[PathBuf]) -> Result<ModelShape, EstimateError> {
    let files = WeightFiles::open(paths)?;
    let tensors = files.shapes().map(|(name, shape)| (name.to_owned(), shape.to_vec()));
    Ok(ModelShape::from_weights(tensors))
}

fn read(path: &Path) -> Result<String, EstimateError> {
    fs::read_to_string(path).map_err(|source| EstimateError::Read {
        path: path.to_owned(),
        source,
    })
}
