//! Adapters as a folder of PEFT's, which `PeftModel.from_pretrained` loads beside the base model.

use super::tensors::take_tensor;
use super::weight_files::write_file;
use super::{ExportError, ExportedTensor, NewFolder};
use crate::nn::is_adapter_name;
use candle_core::Tensor;
use serde::{Deserialize, Serialize, Serializer};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What PEFT puts before the names of the base model.
const PREFIX: &str = "base_model.model.";

/// The contents of `adapter_config.json`: what PEFT must know to put adapters beside a base model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PeftConfig {
    /// The kind of adapter.
    pub peft_type: PeftType,
    /// What the model is for, such as `CAUSAL_LM`; `None` where PEFT need not know.
    pub task_type: Option<String>,
    /// The name or folder of the base model; `None` leaves it to who loads.
    pub base_model_name_or_path: Option<String>,
    /// Rows of A and columns of B.
    pub r: usize,
    /// The product is multiplied by `lora_alpha / r`.
    #[serde(serialize_with = "as_whole_number")]
    pub lora_alpha: f64,
    /// Whether it is multiplied by `lora_alpha / √r` instead.
    #[serde(default)]
    pub use_rslora: bool,
    /// The probability of dropout in training.
    pub lora_dropout: f64,
    /// The last parts of the names of the layers with adapters, such as `q_proj`; where there are none, those of the tensors
    /// exported.
    pub target_modules: Vec<String>,
    /// Which biases are trained: `none`.
    pub bias: String,
    /// Whether weights are `[in, out]`: never here.
    pub fan_in_fan_out: bool,
    /// Whether adapters are loaded frozen.
    pub inference_mode: bool,
}

/// A kind of adapter that PEFT knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeftType {
    /// [`LoraLinear`](crate::nn::LoraLinear).
    #[serde(rename = "LORA")]
    Lora,
}

impl Default for PeftConfig {
    fn default() -> Self {
        Self {
            peft_type: PeftType::Lora,
            task_type: None,
            base_model_name_or_path: None,
            r: 8,
            lora_alpha: 8.0,
            use_rslora: false,
            lora_dropout: 0.0,
            target_modules: Vec::new(),
            bias: "none".into(),
            fan_in_fan_out: false,
            inference_mode: true,
        }
    }
}

/// Some readers expect an integer.
fn as_whole_number<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    if value.fract() == 0.0 && (0.0..1e15).contains(value) {
        serializer.serialize_u64(*value as u64)
    } else {
        serializer.serialize_f64(*value)
    }
}

/// Writes the adapters among `tensors`, on any device, to a new folder: `adapter_model.safetensors` with PEFT's names
/// (`base_model.model.LAYER.lora_A.weight`) and `adapter_config.json`. The folder appears whole or not at all. Returns how many
/// tensors it has.
///
/// # Errors
/// [`ExportError::Unusable`] when there are no adapters, one is half there or not of the rank that `config` says, `folder` is
/// not empty, or a file cannot be written; failures of candle.
pub fn export_peft(
    folder: impl AsRef<Path>,
    tensors: &[(String, Tensor)],
    config: &PeftConfig,
) -> Result<usize, ExportError> {
    let folder = folder.as_ref();
    let adapters = tensors.iter().filter(|(name, _)| is_adapter_name(name));
    let adapters = Vec::from_iter(adapters.map(|(name, tensor)| (name.as_str(), tensor)));
    let targets = check(&adapters, config).map_err(|reason| ExportError::unusable(folder, reason))?;
    let mut config = config.clone();
    if config.target_modules.is_empty() {
        config.target_modules = targets;
    }
    let plan = Vec::from_iter(adapters.iter().map(|(name, tensor)| ExportedTensor {
        name: format!("{PREFIX}{name}"),
        shape: tensor.dims().to_vec(),
        dtype: Tensor::dtype(tensor),
    }));
    let new = NewFolder::create(folder)?;
    let path = new.path().join("adapter_model.safetensors");
    let numbers = Vec::from_iter(0..plan.len());
    write_file(&path, &plan, &numbers, &mut |number, take| {
        let (name, tensor) = adapters[number];
        take_tensor(folder, name, tensor, take)
    })?;
    let path = new.path().join("adapter_config.json");
    let text = serde_json::to_string_pretty(&config).map_err(|error| ExportError::unusable(&path, error))?;
    std::fs::write(&path, text + "\n").map_err(|error| ExportError::unusable(&path, error))?;
    new.finish()?;
    Ok(plan.len())
}

/// Checks that adapters are whole and of the rank said; returns the last parts of the names of their layers.
fn check(adapters: &[(&str, &Tensor)], config: &PeftConfig) -> Result<Vec<String>, String> {
    let mut layers: BTreeMap<&str, [Option<&Tensor>; 2]> = BTreeMap::new();
    for (name, tensor) in adapters {
        let half = [".lora_A.weight", ".lora_B.weight"]
            .into_iter()
            .enumerate()
            .find_map(|(half, end)| Some((half, name.strip_suffix(end)?)));
        let Some((half, layer)) = half else {
            return Err(format!(
                "{name:?} is no adapter of a layer with a name: expected LAYER.lora_A.weight or LAYER.lora_B.weight"
            ));
        };
        if layers.entry(layer).or_default()[half].replace(tensor).is_some() {
            return Err(format!("{name:?} was given twice"));
        }
    }
    if layers.is_empty() {
        return Err("there are no adapters (lora_A.weight, lora_B.weight) among the tensors for this folder".into());
    }
    let mut targets = BTreeSet::new();
    for (layer, halves) in layers {
        let [Some(a), Some(b)] = halves else {
            return Err(format!("{layer:?} has only one of lora_A.weight and lora_B.weight"));
        };
        match (a.dims(), b.dims()) {
            ([rows, _], [_, columns]) if rows == columns && *rows == config.r => {}
            (a, b) => {
                return Err(format!(
                    "{layer:?} has lora_A of {a:?} and lora_B of {b:?}, expected [{r}, in] and [out, {r}]: r is {r}",
                    r = config.r
                ));
            }
        }
        targets.extend(layer.rsplit('.').next().map(str::to_owned));
    }
    Ok(targets.into_iter().collect())
}
