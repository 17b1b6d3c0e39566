//! Tokens with a meaning of their own, as the files of a model folder name them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::TextEncoder;
use crate::huggingface::ModelFolder;

/// What ends a text, what fills up a row, and what templates call these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The text of each token that has a name in `tokenizer_config.json`, such as `bos_token`.
    pub by_name: BTreeMap<String, String>,
    /// The id that ends a text, where there is one.
    pub end: Option<i64>,
    /// The id that fills up rows; it is never learnt.
    pub padding: i64,
    /// Ids after which nothing more is generated.
    pub stops: BTreeSet<i64>,
}

const NAMED: [&str; 7] = [
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "mask_token",
];

impl SpecialTokens {
    /// Reads them from `tokenizer_config.json`, `special_tokens_map.json`, `config.json` and `generation_config.json`, as far
    /// as they are there. A model that reads bytes ends its texts with byte 0, which no text has.
    ///
    /// # Errors
    /// If one of the files is not JSON.
    pub fn read(folder: &ModelFolder, encoder: &TextEncoder) -> Result<Self> {
        let mut by_name = BTreeMap::new();
        for file in ["tokenizer_config.json", "special_tokens_map.json"] {
            let Some(values) = json(&folder.directory.join(file))? else {
                continue;
            };
            for name in NAMED {
                // A token is text, or an object that says how it is found in text.
                let value = values.get(name).map(|value| value.get("content").unwrap_or(value));
                if let Some(text) = value.and_then(Value::as_str) {
                    by_name.entry(name.to_owned()).or_insert_with(|| text.to_owned());
                }
            }
        }
        let config: Value = serde_json::from_str(&folder.config)
            .with_context(|| format!("{}: is not JSON", folder.config_path().display()))?;
        let generation = json(&folder.directory.join("generation_config.json"))?;
        let named = |name: &str| by_name.get(name).and_then(|text| encoder.id_of(text));
        let of_config = ids(&config["eos_token_id"]);
        let of_generation = generation.map_or(Vec::new(), |values| ids(&values["eos_token_id"]));
        let mut end = named("eos_token").or(of_config.first().copied());
        if end.is_none() && encoder.is_of_bytes() {
            end = Some(0);
        }
        let padding = named("pad_token").or(ids(&config["pad_token_id"]).first().copied());
        Ok(Self {
            padding: padding.or(end).unwrap_or(0),
            stops: of_config.into_iter().chain(of_generation).chain(end).collect(),
            end,
            by_name,
        })
    }
}

fn json(path: &Path) -> Result<Option<Value>> {
    if !path.is_file() {
        return Ok(None);
    }
    let read = || -> Result<Value> { Ok(serde_json::from_str(&fs::read_to_string(path)?)?) };
    let value = read().with_context(|| format!("{}: cannot be read as JSON", path.display()))?;
    Ok(Some(value))
}

/// Ids are one number, or a list.
fn ids(value: &Value) -> Vec<i64> {
    match value {
        Value::Array(ids) => ids.iter().filter_map(Value::as_i64).collect(),
        other => other.as_i64().into_iter().collect(),
    }
}
