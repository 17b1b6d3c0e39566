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
        let written = configuration.to_text(format, &|setting| Some(setting.about.to_owned()));
        let again = Configuration::parse(&written, "again", format)
            .unwrap_or_else(|error| panic!("{error}: is in what was written of {configuration:?}:\n{written}"));
        assert_eq!(values(&again), values(configuration), "{written}");
    }
}

/// The settings and their values; a null in a DeepSpeed configuration says nothing, and may be left out.
fn values(configuration: &Configuration) -> Vec<(&'static str, Value)> {
    let values = configuration.iter();
    values
        .map(|(setting, configured)| (setting.path, without_nulls(configured.value.to_json())))
        .collect()
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(keys) => {
            let given = keys.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(given.map(|(key, value)| (key, without_nulls(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(without_nulls).collect()),
        other => other,
    }
}
