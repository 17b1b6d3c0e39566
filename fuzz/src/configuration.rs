//! Configuration files: any text is a configuration or an error, and what is read is written so that it is read again.

use sconce_core::config::{Configuration, Format};
use serde_json::Value;

const FORMATS: [Format; 3] = [Format::Yaml, Format::Json, Format::Toml];

/// Reads a text in every format.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    for format in FORMATS {
        match Configuration::parse(text, "run", format) {
            Ok(configuration) => check(&configuration),
            Err(error) => assert!(error.to_string().contains("run"), "{error} names no file"),
        }
    }
}

fn check(configuration: &Configuration) {
    for warning in configuration.warnings() {
        assert!(!warning.to_string().is_empty());
    }
    let _ = configuration.paradigm().map_err(|error| error.to_string());
    for format in FORMATS {
        // TOML has no null, so that keys of DeepSpeed's without a value are not written.
        if format == Format::Toml && values(configuration).iter().any(|(_, value)| has_null(value)) {
            continue;
        }
        let written = configuration.to_text(format, &|setting| Some(setting.about.to_owned()));
        let again = Configuration::parse(&written, "again", format)
            .unwrap_or_else(|error| panic!("{error}: is in what was written of {configuration:?}:\n{written}"));
        assert_eq!(values(&again), values(configuration), "{written}");
    }
}

fn values(configuration: &Configuration) -> Vec<(&'static str, Value)> {
    let values = configuration.iter();
    values
        .map(|(setting, configured)| (setting.path, configured.value.to_json()))
        .collect()
}

fn has_null(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.iter().any(has_null),
        Value::Object(keys) => keys.values().any(has_null),
        _ => false,
    }
}
