//! The trained model, or its adapters, as folders that other programs open.

use std::path::Path;

use anyhow::{Context as _, Result};
use sconce_core::Accelerator;
use sconce_core::export::export_peft;
use sconce_core::nn::LoraLinear;
use sconce_examples::huggingface::{ModelFolder, write_model_folder};
use sconce_examples::models::LlamaAdapters;

use crate::arguments::Arguments;

/// Writes the result to the folder of `--output_dir`, if there is one; called by all ranks.
pub(crate) fn write(
    arguments: &Arguments,
    acc: &dyn Accelerator,
    folder: &ModelFolder,
    adapters: Option<&LlamaAdapters>,
) -> Result<()> {
    let Some(directory) = &arguments.output_dir else {
        return Ok(());
    };
    match adapters.filter(|_| !arguments.merge_adapters) {
        Some(adapters) => write_adapters(directory, arguments, acc, adapters)?,
        None => {
            let weights = acc.state_dict()?;
            let write = || {
                let weights = match adapters {
                    Some(adapters) => adapters.merge(weights)?,
                    None => weights,
                };
                write_model_folder(directory, folder, weights)
            };
            acc.together(if acc.is_main_process() { write() } else { Ok(()) })?;
        }
    }
    acc.print(format_args!("wrote {}", directory.display()));
    Ok(())
}

fn write_adapters(
    directory: &Path,
    arguments: &Arguments,
    acc: &dyn Accelerator,
    adapters: &LlamaAdapters,
) -> Result<()> {
    // Gathers the adapters alone, not the base.
    let which = LoraLinear::adapter_parameters();
    let tensors = acc.engine().read(&which, |gathered| {
        let names = gathered.names();
        names.map(|name| Ok((name.to_owned(), gathered.get(name)?))).collect()
    })?;
    let tensors: Vec<(String, candle_core::Tensor)> = tensors;
    let base = std::path::absolute(&arguments.model_dir).context("--model_dir")?;
    let config = adapters.peft_config(Some(base.display().to_string()));
    let write = || export_peft(directory, &tensors, &config);
    acc.together(if acc.is_main_process() {
        write().map(drop)
    } else {
        Ok(())
    })?;
    Ok(())
}
