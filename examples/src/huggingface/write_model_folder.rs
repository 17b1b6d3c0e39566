//! Writes a model folder that transformers can open, whole or not at all.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use candle_core::{DType, Tensor};
use sconce_core::export::{Library, MAX_SHARD_SIZE, NewFolder, export_tensors};
use serde_json::{Map, Value};

use super::ModelFolder;
use super::model_folder::CONFIG_FILE;

/// Files beside config and weights without which a trained folder could not be used like the one it came from.
const COMPANION_FILES: [&str; 6] = [
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
];

/// Writes trained weights as a model folder like `source`.
///
/// `config.json` is that of `source` with the dtype of the first tensor; the tokenizer's files are copied. `tensors`
/// are (name, tensor) pairs, on any device; models of more than 5 GB are written in shards. `directory` appears whole or not
/// at all.
///
/// # Errors
/// If `directory` exists and is not empty, there are no tensors or one name twice, or a file cannot be written.
pub fn write_model_folder(
    directory: &Path,
    source: &ModelFolder,
    tensors: impl IntoIterator<Item = (String, Tensor)>,
) -> Result<()> {
    let tensors: Vec<(String, Tensor)> = tensors.into_iter().collect();
    let unfinished = NewFolder::create(directory)?;
    let write = || -> Result<()> {
        // First what can fail at once: weights may take minutes.
        let (_, first) = tensors.first().context("no tensors were given")?;
        let config = config_with_dtype(source, first.dtype())?;
        export_tensors(unfinished.path(), &tensors, Library::Transformers, MAX_SHARD_SIZE)?;
        fs::write(unfinished.path().join(CONFIG_FILE), config)?;
        for name in COMPANION_FILES {
            let companion = source.directory.join(name);
            if companion.is_file() {
                fs::copy(&companion, unfinished.path().join(name))
                    .with_context(|| format!("copying {}", companion.display()))?;
            }
        }
        Ok(())
    };
    write().with_context(|| format!("{}: the model could not be written", directory.display()))?;
    Ok(unfinished.finish()?)
}

/// Checks that a model folder can be written at `directory`, to be asked before a long training run.
///
/// # Errors
/// If `directory` exists and is not an empty folder: nothing is ever overwritten.
pub fn check_model_folder_is_free(directory: &Path) -> Result<()> {
    // Made and removed: a run should not find out after its last step that it cannot write.
    Ok(NewFolder::create(directory).map(drop)?)
}

/// transformers 5 names the dtype `dtype`, transformers 4 `torch_dtype`; a file keeps the name it has.
fn config_with_dtype(source: &ModelFolder, dtype: DType) -> Result<String> {
    let name = match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        DType::F32 => "float32",
        DType::F64 => "float64",
        other => bail!(
            "weights have the dtype {}, expected f16, bf16, f32 or f64",
            other.as_str()
        ),
    };
    let mut config: Map<String, Value> = serde_json::from_str(&source.config)
        .with_context(|| format!("{}: is not a JSON object", source.config_path().display()))?;
    let old_key = config.contains_key("torch_dtype") && !config.contains_key("dtype");
    let key = if old_key { "torch_dtype" } else { "dtype" };
    config.insert(key.to_owned(), Value::from(name));
    Ok(serde_json::to_string_pretty(&config)? + "\n")
}
