//! A JSON Schema of configuration files, for editors.

use super::foreign_keys;
use super::settings::{DEEPSPEED, SECTIONS, SETTINGS};
use super::{Kind, Setting};
use serde_json::{Map, Value as Json, json};

/// Returns the schema (draft 2020-12). It allows what [`Configuration::read`](super::Configuration::read) reads in an
/// editor's usual spelling: values in quotes that are none in the schema load all the same.
pub fn schema() -> Json {
    let mut top = Map::new();
    for (section, _) in SECTIONS {
        let mut keys = Map::new();
        let within = |path: &'static str| {
            path.split_once('.')
                .filter(|(of, _)| *of == section)
                .map(|(_, key)| key)
        };
        for setting in SETTINGS {
            for path in std::iter::once(&setting.path).chain(setting.aliases) {
                if let Some(key) = within(path) {
                    keys.insert(key.into(), of_setting(setting));
                }
            }
        }
        let idle = foreign_keys::paths().filter_map(within);
        idle.for_each(|key| drop(keys.insert(key.into(), without_effect())));
        // DeepSpeed's own keys may stand in its section.
        top.insert(
            section.into(),
            json!({"type": ["object", "null"], "properties": keys, "additionalProperties": section == DEEPSPEED}),
        );
    }
    for setting in SETTINGS.iter().filter(|setting| setting.section().is_none()) {
        for path in std::iter::once(&setting.path).chain(setting.aliases) {
            top.insert((*path).into(), of_setting(setting));
        }
    }
    let idle = foreign_keys::paths().filter(|path| !path.contains('.'));
    idle.for_each(|key| drop(top.insert(key.into(), without_effect())));
    for section in ["dynamo_config", "megatron_lm_config", "ipex_config"] {
        top.insert(section.into(), without_effect());
    }
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of sconce launch",
        "type": "object",
        "properties": top,
        "additionalProperties": false,
    })
}

fn of_setting(setting: &Setting) -> Json {
    let mut schema = match setting.kind {
        Kind::Flag => json!({"type": ["boolean", "null"]}),
        Kind::Whole(least) => json!({"type": ["integer", "null"], "minimum": least}),
        Kind::Number => json!({"type": ["number", "null"], "minimum": 0}),
        Kind::OneOf(names) => {
            let numbers = names.iter().filter_map(|name| name.parse::<u64>().ok()).map(Json::from);
            let flags = names
                .iter()
                .filter_map(|name| name.parse::<bool>().ok())
                .map(Json::from);
            let all = names.iter().map(|name| Json::from(*name)).chain(numbers).chain(flags);
            json!({"enum": Vec::from_iter(all.chain([Json::Null]))})
        }
        Kind::Text => json!({"type": ["string", "number", "null"]}),
        Kind::Words => {
            json!({"type": ["string", "integer", "array", "null"], "items": {"type": ["string", "integer"]}})
        }
        Kind::Machines => json!({"type": ["string", "integer", "null"], "pattern": "^[0-9]+(:[0-9]+)?$", "minimum": 1}),
    };
    schema["description"] = setting.about.into();
    let default = setting.default.and_then(|text| setting.kind.read_text(text));
    if let Some(default) = default {
        schema["default"] = default.to_json();
    }
    schema
}

fn without_effect() -> Json {
    json!({"description": "Known to Accelerate; has no effect here", "deprecated": true})
}
