//! What a run leaves: adapters as diffusers' pipelines load them, or a whole transformer folder.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use candle_core::{Device, Tensor};
use sconce_core::export::{Library, MAX_SHARD_SIZE, NewFolder, export_tensors};
use sconce_core::nn::LoraLinear;
use sconce_core::{Accelerator, Engine};
use sconce_examples::huggingface::ModelFolder;
use sconce_examples::models::Adapters;
use serde_json::{Map, Value, json};

/// The name by which `load_lora_weights` finds adapters in a folder.
const LORA_FILE: &str = "pytorch_lora_weights.safetensors";

/// Writes adapters to `folder` in the format of diffusers' pipelines: `pipeline.load_lora_weights(folder)`. Called by all ranks, of
/// which those that are `main` write.
///
/// # Errors
/// Failures of the group and of writing.
pub(crate) fn write_adapters(engine: &Engine, adapters: &Adapters, folder: &Path, main: bool) -> Result<()> {
    let tensors = engine.read(&LoraLinear::adapter_parameters(), |gathered| {
        let names = Vec::from_iter(gathered.names().filter(|_| main));
        let tensor = |name: &str| Ok((format!("transformer.{name}"), gathered.get(name)?));
        names.into_iter().map(tensor).collect::<sconce_zero::Result<Vec<_>>>()
    })?;
    if !main {
        return Ok(());
    }
    let mut on_host = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        on_host.push((name, tensor.to_device(&Device::Cpu)?));
    }
    // One entry: the order of several is that of a hash map, another in every run.
    let metadata = HashMap::from([("lora_adapter_metadata".to_owned(), peft_settings(adapters)?)]);
    let path = folder.join(LORA_FILE);
    let views = on_host.iter().map(|(name, tensor): &(String, Tensor)| (name, tensor));
    safetensors::serialize_to_file(views, Some(metadata), &path).with_context(|| path.display().to_string())
}

/// Returns the settings of PEFT's `LoraConfig`, by which the scale of adapters is known to who loads them.
fn peft_settings(adapters: &Adapters) -> Result<String> {
    let options = adapters.options();
    // PEFT has an integer for alpha.
    let alpha = match options.alpha.fract() == 0.0 {
        true => Value::from(options.alpha as i64),
        false => Value::from(options.alpha),
    };
    let settings = [
        ("r", json!(options.rank)),
        ("lora_alpha", alpha),
        ("lora_dropout", json!(options.dropout)),
        ("target_modules", json!(adapters.targets())),
        ("bias", json!("none")),
    ];
    let settings: Map<String, Value> = settings
        .into_iter()
        .map(|(name, value)| (format!("transformer.{name}"), value))
        .collect();
    Ok(serde_json::to_string(&settings)?)
}

/// Writes the result of a run below `output`: adapters in `lora`, or all weights in `transformer`, a folder that takes the place of
/// that in the pipeline. Called by all ranks.
///
/// # Errors
/// If the folder is there already and not empty; failures of the group and of writing.
pub(crate) fn write(
    acc: &dyn Accelerator,
    source: &ModelFolder,
    adapters: Option<&Adapters>,
    output: &Path,
) -> Result<()> {
    let is_main = acc.is_main_process();
    let folder = output.join(folder_name(adapters));
    let new = if is_main {
        NewFolder::create(&folder).map(Some)
    } else {
        Ok(None)
    };
    let new = acc.together(new)?;
    match adapters {
        Some(adapters) => {
            let place = new.as_ref().map_or(output, |new| new.path());
            acc.together(write_adapters(acc.engine(), adapters, place, is_main))?;
        }
        None => {
            let tensors = acc.state_dict()?;
            let write = |new: &NewFolder| -> Result<()> {
                export_tensors(new.path(), &tensors, Library::Diffusers, MAX_SHARD_SIZE)?;
                Ok(fs::write(new.path().join("config.json"), &source.config)?)
            };
            acc.together(new.as_ref().map_or(Ok(()), write))?;
        }
    }
    acc.together(new.map_or(Ok(()), NewFolder::finish))?;
    acc.print(format_args!("wrote {}", folder.display()));
    Ok(())
}

/// Checks that the result can be written, to be asked before training.
///
/// # Errors
/// If its folder is there already and not empty.
pub(crate) fn check_is_free(adapters: Option<&Adapters>, output: &Path) -> Result<()> {
    Ok(NewFolder::create(&output.join(folder_name(adapters))).map(drop)?)
}

fn folder_name(adapters: Option<&Adapters>) -> &'static str {
    if adapters.is_some() { "lora" } else { "transformer" }
}
