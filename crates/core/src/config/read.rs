//! From a file's tree to settings, whatever age the file has.

use super::configuration::Configured;
use super::document::Document;
use super::foreign_keys::{self, foreign_key, foreign_section, refused_value};
use super::inline_deepspeed;
use super::setting::Setting;
use super::settings::{DEEPSPEED, DEEPSPEED_FILE, DISTRIBUTED_TYPE, SECTIONS, SETTINGS, setting};
use super::{Configuration, ConfigurationError, Format, Origin, Place, Value, Warning};
use crate::deepspeed::Node;
use crate::nearest::nearest;
use std::path::Path;

impl Configuration {
    /// Reads a file: YAML, JSON under any name, or TOML; Accelerate's, DeepSpeed's or our own.
    ///
    /// # Errors
    /// A file that cannot be read or is larger than 1 MiB, and what [`Self::parse`] refuses.
    pub fn read(file: &Path) -> Result<Self, ConfigurationError> {
        Self::from_document(Document::read(file)?)
    }

    /// Reads files; what a later one says takes the place of what an earlier one says.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_all<'f>(files: impl IntoIterator<Item = &'f Path>) -> Result<Self, ConfigurationError> {
        let mut merged = Self::new();
        for file in files {
            merged = Self::read(file)?.or(merged);
        }
        Ok(merged)
    }

    /// Reads a text; `file` names it in messages.
    ///
    /// # Errors
    /// A text of another format, unknown keys, unusable values, what is not supported, and keys that exclude each other.
    pub fn parse(text: &str, file: &str, format: Format) -> Result<Self, ConfigurationError> {
        Self::from_document(Document::parse(text, file, format)?)
    }

    fn from_document(mut document: Document) -> Result<Self, ConfigurationError> {
        let mut configuration = Self::new();
        let warnings = std::mem::take(&mut document.warnings);
        warnings.into_iter().for_each(|warning| configuration.warn(warning));
        let reader = Reader { document: &document };
        match &document.tree {
            Node::Null => {}
            Node::Object(entries) if inline_deepspeed::is_whole_file(entries) => {
                reader.whole_deepspeed(&mut configuration)?;
            }
            Node::Object(entries) => {
                // First what decides which keys there may be.
                let mut entries = Vec::from_iter(entries);
                entries.sort_by_key(|(key, _)| key != "compute_environment");
                for (key, value) in entries {
                    reader.top_level(key, value, &mut configuration)?;
                }
            }
            other => {
                return Err(ConfigurationError::Value {
                    place: document.file.clone(),
                    found: other.to_string(),
                    expected: "keys with values".into(),
                });
            }
        }
        Ok(configuration)
    }
}

struct Reader<'d> {
    document: &'d Document,
}

impl Reader<'_> {
    fn top_level(&self, key: &str, value: &Node, into: &mut Configuration) -> Result<(), ConfigurationError> {
        let place = self.document.place(key);
        if let Some(reason) = foreign_section(key) {
            let is_empty = matches!(value, Node::Null) || matches!(value, Node::Object(entries) if entries.is_empty());
            if !is_empty {
                into.warn(no_effect(&place, reason));
            }
            return Ok(());
        }
        let name = match key {
            "dynamo_config" => return self.section("dynamo_config", "dynamo_", value, into),
            // Both are of Accelerate's first versions.
            "fp16" => return self.old_fp16(place, value, into),
            "dynamo_backend" => "dynamo_config.dynamo_backend",
            key => key,
        };
        if let Some((section, prefix)) = SECTIONS.iter().find(|(section, _)| *section == key) {
            return self.section(section, prefix, value, into);
        }
        self.entry(name, place, value, into)
    }

    fn section(
        &self,
        section: &'static str,
        prefix: &str,
        value: &Node,
        into: &mut Configuration,
    ) -> Result<(), ConfigurationError> {
        let entries = match value {
            Node::Null => return Ok(()),
            Node::Object(entries) => entries,
            // A section that was left empty.
            Node::Text(text) if text.trim().is_empty() => return Ok(()),
            other => {
                return Err(ConfigurationError::Value {
                    place: self.document.place(section).to_string(),
                    found: other.to_string(),
                    expected: "keys with values".into(),
                });
            }
        };
        let (inline, others) = match section {
            DEEPSPEED => inline_deepspeed::split(entries),
            _ => (None, entries.clone()),
        };
        if section == DEEPSPEED {
            let file = inline.iter().map(|_| "deepspeed_config_file".to_owned());
            let given = others.iter().filter(|(_, value)| *value != Node::Null);
            into.deepspeed_fields = file.chain(given.map(|(key, _)| key.clone())).collect();
        }
        let is_known = |path: &str| setting(path).is_some() || foreign_key(path).is_some();
        for (key, value) in &others {
            let path = format!("{section}.{key}");
            let place = self.document.place(&path);
            let with_prefix = format!("{section}.{prefix}{key}");
            let without_prefix = || format!("{section}.{}", key.strip_prefix(prefix).unwrap_or(key));
            let mut spellings = [path, with_prefix].into_iter();
            let path = spellings.find(|path| is_known(path)).unwrap_or_else(without_prefix);
            self.entry(&path, place, value, into)?;
        }
        if let Some(inline) = inline {
            let place = self.document.place(section);
            let value = inline_deepspeed::value(&inline, &place, into)?;
            let file = known_setting(DEEPSPEED_FILE);
            self.insert(file, value, place, into)?;
        }
        Ok(())
    }

    fn entry(
        &self,
        path: &str,
        place: Place,
        value: &Node,
        into: &mut Configuration,
    ) -> Result<(), ConfigurationError> {
        if let Some(key) = foreign_key(path) {
            if key.asks(value) {
                into.warn(no_effect(&place, key.reason));
            }
            return Ok(());
        }
        let Some(setting) = setting(path) else {
            return Err(ConfigurationError::UnknownKey {
                place: place.to_string(),
                nearest: nearest_key(path),
            });
        };
        // `null` says nothing, as does DeepSpeed's and Accelerate's "none" for a path.
        if *value == Node::Null {
            return Ok(());
        }
        if let Node::Text(text) = value {
            if let Some(reason) = refused_value(setting.path, text) {
                return Err(ConfigurationError::Unsupported {
                    place: place.to_string(),
                    found: text.clone(),
                    reason: reason.into(),
                });
            }
            if is_none(setting, text) {
                return Ok(());
            }
        }
        let value = setting.kind.read_node(value).ok_or_else(|| ConfigurationError::Value {
            place: place.to_string(),
            found: value.to_string(),
            expected: setting.kind.expected(),
        })?;
        self.insert(setting, value, place, into)
    }

    /// Takes a value; another of the same file for the same setting, under another name, is an error.
    fn insert(
        &self,
        setting: &'static Setting,
        value: Value,
        place: Place,
        into: &mut Configuration,
    ) -> Result<(), ConfigurationError> {
        if let Some(earlier) = into.get(setting.path).filter(|earlier| earlier.value != value) {
            return Err(ConfigurationError::Conflict {
                first: format!("{} ({})", earlier.origin, shown(&earlier.value)),
                second: format!("{place} ({})", shown(&value)),
                advice: "they are one setting; keep one of them".into(),
            });
        }
        let origin = Origin::File(place);
        into.insert(setting, Configured { value, origin });
        Ok(())
    }

    fn old_fp16(&self, place: Place, value: &Node, into: &mut Configuration) -> Result<(), ConfigurationError> {
        let flag = super::Kind::Flag.read_node(value);
        match (flag.and_then(|flag| flag.as_flag()), value) {
            (Some(true), _) => {
                let precision = known_setting("mixed_precision");
                self.insert(precision, Value::from("fp16"), place, into)
            }
            (Some(false), _) | (None, Node::Null) => Ok(()),
            (None, other) => Err(ConfigurationError::Value {
                place: place.to_string(),
                found: other.to_string(),
                expected: super::Kind::Flag.expected(),
            }),
        }
    }

    /// A file that is a DeepSpeed configuration itself: ranks read it where it is JSON, and are given it otherwise.
    fn whole_deepspeed(&self, into: &mut Configuration) -> Result<(), ConfigurationError> {
        let place = self.document.place("");
        let value = inline_deepspeed::value(&self.document.tree, &place, into)?;
        let value = if self.document.is_json && Path::new(&self.document.file).is_file() {
            Value::Text(self.document.file.clone())
        } else {
            value
        };
        self.insert(known_setting(DEEPSPEED_FILE), value, place.clone(), into)?;
        self.insert(known_setting(DISTRIBUTED_TYPE), Value::from("DEEPSPEED"), place, into)
    }
}

fn no_effect(place: &Place, reason: &str) -> Warning {
    Warning::new(place, format!("has no effect here: {reason}"))
}

fn shown(value: &Value) -> String {
    match value {
        Value::DeepSpeed(_) => "keys of DeepSpeed's".into(),
        value => value.to_string(),
    }
}

/// Accelerate writes `none` where there is no path and no norm.
fn is_none(setting: &Setting, text: &str) -> bool {
    let may_be_none = setting.path.starts_with(DEEPSPEED) && !setting.path.ends_with("_device");
    may_be_none && text.trim().eq_ignore_ascii_case("none")
}

fn known_setting(path: &'static str) -> &'static Setting {
    setting(path).expect("the table has the key")
}

/// The known key, in its section if it has one, that is nearest to an unknown one.
fn nearest_key(path: &str) -> Option<String> {
    let (section, key) = match path.split_once('.') {
        Some((section, key)) => (Some(section), key),
        None => (None, path),
    };
    let settings = SETTINGS
        .iter()
        .flat_map(|setting| [setting.path].into_iter().chain(setting.aliases.iter().copied()));
    let paths = settings.chain(foreign_keys::paths());
    let in_section = paths.filter_map(|path| match (path.split_once('.'), section) {
        (Some((of, key)), Some(section)) if of == section => Some(key),
        (None, None) => Some(path),
        _ => None,
    });
    let sections = SECTIONS.iter().map(|(name, _)| *name);
    let others = sections.filter(|_| section.is_none());
    nearest(key, in_section.chain(others)).map(str::to_owned)
}
