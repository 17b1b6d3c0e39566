//! Writes a model folder that transformers can open, whole or not at all.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value};

use super::ModelFolder;
use super::model_folder::{CONFIG_FILE, WEIGHTS_FILE};

/// Files beside config and weights without which a trained folder could not be used like the one it came from.
const COMPANION_FILES: [&str; 5] = [
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
];

/// Writes trained weights as a model folder like `source`.
///
/// `config.json` is that of `source` with the dtype of the first tensor; the tokenizer's files are copied. `tensors`
/// are (name, tensor) pairs, on any device. Everything is written to a folder beside `directory` that is renamed at the
/// end, so that `directory` never holds half a model.
///
/// # Errors
/// If `directory` exists and is not empty, there are no tensors or one name twice, or a file cannot be written.
pub fn write_model_folder(
    directory: &Path,
    source: &ModelFolder,
    tensors: impl IntoIterator<Item = (String, Tensor)>,
) -> Result<()> {
    check_model_folder_is_free(directory)?;
    let tensors: Vec<(String, Tensor)> = tensors.into_iter().collect();
    let mut names = BTreeSet::new();
    for (name, _) in &tensors {
        ensure!(
            names.insert(name),
            "{}: the tensor `{name}` was given twice for this folder",
            directory.display()
        );
    }
    let Some((_, first)) = tensors.first() else {
        bail!("{}: no tensors were given for this folder", directory.display());
    };
    let config = config_with_dtype(source, first.dtype())?;

    let directory = &resolved(directory);
    let unfinished = UnfinishedFolder::create(directory)?;
    let write = || -> Result<()> {
        fs::write(unfinished.path.join(CONFIG_FILE), config)?;
        for name in COMPANION_FILES {
            let companion = source.directory.join(name);
            if companion.is_file() {
                fs::copy(&companion, unfinished.path.join(name))
                    .with_context(|| format!("copying {}", companion.display()))?;
            }
        }
        let weights = unfinished.path.join(WEIGHTS_FILE);
        write_weights(&weights, tensors)?;
        // safetensors writes through a temporary file that only its owner may read.
        fs::set_permissions(&weights, fs::metadata(unfinished.path.join(CONFIG_FILE))?.permissions())?;
        for file in fs::read_dir(&unfinished.path)? {
            File::open(file?.path())?.sync_all()?;
        }
        Ok(())
    };
    write().with_context(|| format!("{}: the model could not be written", unfinished.path.display()))?;
    unfinished.finish(directory)
}

/// Checks that a model folder can be written at `directory`, to be asked before a long training run.
///
/// # Errors
/// If `directory` exists and is not an empty folder: nothing is ever overwritten.
pub fn check_model_folder_is_free(directory: &Path) -> Result<()> {
    let free = match fs::read_dir(directory) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => true,
        Err(error) => {
            return Err(error).with_context(|| format!("{}: cannot become a model folder", directory.display()));
        }
    };
    ensure!(
        free,
        "{}: is not empty, expected a new or empty folder to write a model to; remove it or choose another name",
        directory.display()
    );
    // Made and removed: a run should not find out after its last step that it cannot write.
    UnfinishedFolder::create(&resolved(directory)).map(drop)
}

/// Returns where a folder really is, if it exists: a link cannot be replaced by a rename, and `.` has no name.
fn resolved(directory: &Path) -> PathBuf {
    fs::canonicalize(directory).unwrap_or_else(|_| directory.to_owned())
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

/// transformers refuses a file whose metadata does not say `format: pt`.
fn write_weights(path: &Path, tensors: Vec<(String, Tensor)>) -> Result<()> {
    // Copied to the host here, because the `View` of a candle tensor panics where such a copy fails.
    let tensors = tensors
        .into_iter()
        .map(|(name, tensor)| Ok((name, tensor.to_device(&Device::Cpu)?)))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    safetensors::serialize_to_file(tensors, Some(metadata), path)?;
    Ok(())
}

/// A folder beside its final place, removed again unless it is finished.
struct UnfinishedFolder {
    path: PathBuf,
    finished: bool,
}

impl UnfinishedFolder {
    fn create(target: &Path) -> Result<Self> {
        let Some(name) = target.file_name() else {
            bail!(
                "{}: has no name of its own, expected the path of a folder to create",
                target.display()
            );
        };
        let mut unfinished = std::ffi::OsString::from(".");
        unfinished.push(name);
        unfinished.push(format!(".unfinished-{}", std::process::id()));
        let path = target.with_file_name(unfinished);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).with_context(|| format!("{}: cannot be created", parent.display()))?;
        }
        fs::create_dir(&path).with_context(|| format!("{}: cannot be created", path.display()))?;
        Ok(Self { path, finished: false })
    }

    fn finish(mut self, target: &Path) -> Result<()> {
        // Whole by now: whatever happens to the rename, it stays.
        self.finished = true;
        // Replaces an empty folder, on every Unix; refuses one that has been filled meanwhile.
        fs::rename(&self.path, target).with_context(|| {
            let (path, target) = (self.path.display(), target.display());
            format!("the model is complete in {path}, but that cannot be renamed to {target}; rename it by hand")
        })
    }
}

impl Drop for UnfinishedFolder {
    fn drop(&mut self) {
        if !self.finished {
            // Best effort: the error that led here is the one to report.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
