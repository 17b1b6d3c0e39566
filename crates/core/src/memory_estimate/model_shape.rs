//! A model as what it is made of: parameters, and which of them are gathered together.

use super::EstimateError;
use super::cogvideox::CogVideoXShape;
use super::llama::LlamaShape;
use candle_core::DType;
use sconce_zero::{ParameterInfo, PlannedParameter};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// A parameter, and the units that compute with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapedParameter {
    /// Its name, as in the model's files.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Numbers of the units that compute with it, as they run in the forward; none is whole on every rank.
    pub units: Vec<usize>,
}

impl ShapedParameter {
    /// Returns its number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|size| *size as u64).product()
    }

    /// Returns the module that has it: its name without the last part.
    fn module(&self) -> &str {
        self.name.rsplit_once('.').map_or("", |(module, _)| module)
    }
}

/// What is known of a model beside its parameters.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Architecture {
    /// Llama, Mistral, Qwen 2 and 3.
    Llama(LlamaShape),
    /// The transformer of CogVideoX.
    CogVideoX(CogVideoXShape),
    /// Any model of which there are only weights: nothing is known of its activations.
    Unknown,
}

/// A model as shapes.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelShape {
    /// What it calls itself, such as `llama`; `unknown` for weights alone.
    pub kind: String,
    /// Its parameters, in the order in which the model creates them.
    pub parameters: Vec<ShapedParameter>,
    /// What is known beside them.
    pub architecture: Architecture,
}

/// What `config.json` may say of a model that can be estimated.
const SUPPORTED: &str = "supported are `model_type` llama, mistral, qwen2 and qwen3 and `_class_name` CogVideoXTransformer3DModel; of any \
                         other model give the safetensors files";

impl ModelShape {
    /// Reads the text of a `config.json` of transformers or diffusers; `path` is used in messages only.
    ///
    /// # Errors
    /// [`EstimateError::Config`] for text that is no such file, another architecture, and sizes that cannot be.
    pub fn from_config(text: &str, path: &Path) -> Result<Self, EstimateError> {
        let refuse = |reason: String| EstimateError::Config {
            path: path.to_owned(),
            reason,
        };
        let object: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| refuse(format!("is not a JSON object: {error}")))?;
        let named = |key: &str| object.get(key).and_then(Value::as_str);
        match (named("model_type"), named("_class_name")) {
            (Some(kind @ ("llama" | "mistral" | "qwen2" | "qwen3")), _) => {
                let shape = LlamaShape::read(kind, &object).map_err(refuse)?;
                Ok(Self {
                    kind: kind.to_owned(),
                    parameters: shape.parameters(),
                    architecture: Architecture::Llama(shape),
                })
            }
            (_, Some("CogVideoXTransformer3DModel")) => {
                let shape = CogVideoXShape::read(&object).map_err(refuse)?;
                Ok(Self {
                    kind: "cogvideox".to_owned(),
                    parameters: shape.parameters(),
                    architecture: Architecture::CogVideoX(shape),
                })
            }
            (Some(kind), _) => Err(refuse(format!("`model_type` is {kind:?}; {SUPPORTED}"))),
            (None, Some(class)) => Err(refuse(format!("`_class_name` is {class:?}; {SUPPORTED}"))),
            (None, None) => Err(refuse(format!(
                "has neither `model_type` nor `_class_name`; {SUPPORTED}"
            ))),
        }
    }

    /// Makes a model of the names and shapes of its weights. What is numbered (`layers.0`) is taken for units, and so is
    /// every module outside of them.
    pub fn from_weights(tensors: impl IntoIterator<Item = (String, Vec<usize>)>) -> Self {
        let mut tensors = Vec::from_iter(tensors);
        tensors.sort_by_cached_key(|(name, _)| in_order(name));
        let mut numbers = BTreeMap::new();
        let parameter = |(name, shape): (String, Vec<usize>)| {
            let unit = unit_of(&name);
            let next = numbers.len();
            let unit = *numbers.entry(unit).or_insert(next);
            ShapedParameter {
                name,
                shape,
                units: vec![unit],
            }
        };
        Self {
            kind: "unknown".to_owned(),
            parameters: tensors.into_iter().map(parameter).collect(),
            architecture: Architecture::Unknown,
        }
    }

    /// Returns the number of elements of all parameters.
    pub fn elements(&self) -> u64 {
        self.parameters.iter().map(ShapedParameter::elements).sum()
    }

    /// Returns the elements of the largest layer: of the modules that are never divided (a decoder's layer) where they are
    /// known, and of those that have parameters of their own. Accelerate's rule.
    pub fn largest_layer(&self) -> u64 {
        let blocks = match &self.architecture {
            Architecture::Llama(_) => Some("layers."),
            Architecture::CogVideoX(_) => Some("transformer_blocks."),
            Architecture::Unknown => None,
        };
        let mut modules: BTreeMap<&str, u64> = BTreeMap::new();
        for parameter in &self.parameters {
            let block = blocks.and_then(|name| {
                let start = parameter.name.find(name)? + name.len();
                let end = parameter.name[start..].find('.')?;
                Some(&parameter.name[..start + end])
            });
            *modules.entry(block.unwrap_or_else(|| parameter.module())).or_default() += parameter.elements();
        }
        modules.into_values().max().unwrap_or(0)
    }

    /// Returns the parameters as the engine plans with them, all of one dtype and trained.
    pub(super) fn planned(&self, dtype: DType) -> Vec<PlannedParameter> {
        let planned = |parameter: &ShapedParameter| PlannedParameter {
            info: ParameterInfo {
                name: parameter.name.clone(),
                shape: parameter.shape.clone(),
            },
            dtype,
            is_trained: true,
            units: parameter.units.clone(),
        };
        self.parameters.iter().map(planned).collect()
    }
}

/// Returns what to sort names by, so that layer 10 comes after layer 9.
fn in_order(name: &str) -> Vec<(Option<u64>, String)> {
    let part = |part: &str| (part.parse().ok(), part.to_owned());
    name.split('.').map(part).collect()
}

/// Returns the part of a model that a tensor belongs to: up to the first number, or its module.
fn unit_of(name: &str) -> String {
    let parts = Vec::from_iter(name.split('.'));
    let numbered = parts.iter().position(|part| part.parse::<u64>().is_ok());
    let end = numbered.map_or(parts.len() - 1, |position| position + 1);
    parts[..end].join(".")
}

/// Reads a whole number from a configuration.
pub(super) fn size(object: &Map<String, Value>, key: &str) -> Result<usize, String> {
    optional_size(object, key)?.ok_or_else(|| format!("`{key}` is missing, expected a whole number"))
}

/// Reads a whole number from 1, or `None` where there is none or it is null.
pub(super) fn optional_size(object: &Map<String, Value>, key: &str) -> Result<Option<usize>, String> {
    /// Larger than any model's: products of three stay whole numbers.
    const LARGEST: u64 = 1 << 21;
    match object.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(size @ 1..=LARGEST) => Ok(Some(size as usize)),
            _ => Err(format!(
                "`{key}` is {value}, expected a whole number from 1 to {LARGEST}"
            )),
        },
    }
}

/// Reads yes or no, `default` where nothing is said.
pub(super) fn flag(object: &Map<String, Value>, key: &str, default: bool) -> Result<bool, String> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(default),
        Some(Value::Bool(value)) => Ok(*value),
        Some(value) => Err(format!("`{key}` is {value}, expected true or false")),
    }
}
