//! Settings as a file that this crate reads again, and Accelerate too where no key is ours.

use super::configuration::Paradigm;
use super::setting::Setting;
use super::settings::{ACCUMULATION_STEPS, DEEPSPEED, DEEPSPEED_FILE, SECTIONS};
use super::{Configuration, ConfigurationError, Format, Kind, Value};
use serde_json::{Map, Value as Json};
use std::fmt::Write;
use std::path::Path;

/// A comment for a setting; `None` for none.
pub type Comment<'c> = &'c dyn Fn(&Setting) -> Option<String>;

impl Configuration {
    /// Writes a text; `comment` says what stands above a setting, but for JSON, which has no comments.
    pub fn to_text(&self, format: Format, comment: Comment<'_>) -> String {
        let lines = self.lines(comment);
        match format {
            Format::Json => json(&lines),
            Format::Yaml => yaml(&lines),
            Format::Toml => toml(&lines),
        }
    }

    /// Writes a file, in the format that its name says. It is there as a whole or not at all.
    ///
    /// # Errors
    /// A file that cannot be written; one that is the DeepSpeed configuration which the settings name: it would be lost.
    pub fn write(&self, file: &Path, comment: Comment<'_>) -> Result<(), ConfigurationError> {
        if let Some(Value::Text(named)) = self.value(DEEPSPEED_FILE)
            && is_same_file(Path::new(named), file)
        {
            let reason =
                "it is the DeepSpeed configuration that these settings name, and would be lost; write to another file";
            return Err(ConfigurationError::Unwritable {
                file: file.display().to_string(),
                source: std::io::Error::other(reason),
            });
        }
        let text = self.to_text(Format::of(file), comment);
        let write = || {
            if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
                std::fs::create_dir_all(folder)?;
            }
            let mut name = file.file_name().unwrap_or_default().to_owned();
            name.push(".part");
            let part = file.with_file_name(name);
            let written = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, file));
            written.inspect_err(|_| {
                let _ = std::fs::remove_file(&part);
            })
        };
        write().map_err(|source| ConfigurationError::Unwritable {
            file: file.display().to_string(),
            source,
        })
    }

    fn lines(&self, comment: Comment<'_>) -> Vec<Line> {
        let uses_deepspeed = self.paradigm().is_ok_and(|paradigm| paradigm == Paradigm::DeepSpeed);
        let mut lines = Vec::new();
        for (setting, configured) in self.iter() {
            let comment = comment(setting);
            let section = match setting.path {
                // Where Accelerate has it.
                ACCUMULATION_STEPS if uses_deepspeed => Some(DEEPSPEED),
                _ => setting.section(),
            };
            let mut push = |key: &str, value: Json, comment: Option<String>| {
                lines.push(Line {
                    section,
                    key: key.into(),
                    value,
                    comment,
                });
            };
            match (&configured.value, configured.value.to_json()) {
                (Value::DeepSpeed(_), Json::Object(keys)) if setting.path == DEEPSPEED_FILE => {
                    let mut comment = comment;
                    keys.into_iter()
                        .for_each(|(key, value)| push(&key, value, comment.take()));
                }
                (value, _) => push(setting.key(), written(setting, value), comment),
            }
        }
        // Sections after what stands at the top, in their order.
        let place = |line: &Line| SECTIONS.iter().position(|(section, _)| line.section == Some(*section));
        lines.sort_by_key(place);
        lines
    }
}

/// Whether two paths lead to one file that is there.
fn is_same_file(one: &Path, other: &Path) -> bool {
    match (one.canonicalize(), other.canonicalize()) {
        (Ok(one), Ok(other)) => one == other,
        _ => false,
    }
}

/// Numbers and flags among names are written as such, as Accelerate writes them.
fn written(setting: &Setting, value: &Value) -> Json {
    match (setting.kind, value) {
        (Kind::OneOf(_), Value::Text(text)) => {
            let number = text.parse::<u64>().map(Json::from).ok();
            let number = number.or_else(|| text.parse::<bool>().map(Json::from).ok());
            number.unwrap_or_else(|| value.to_json())
        }
        _ => value.to_json(),
    }
}

/// A key, and what is written beside it.
struct Line {
    section: Option<&'static str>,
    key: String,
    value: Json,
    comment: Option<String>,
}

fn json(lines: &[Line]) -> String {
    let mut top = Map::new();
    for line in lines {
        let object = match line.section {
            None => &mut top,
            Some(section) => {
                let section = top.entry(section).or_insert_with(|| Json::Object(Map::new()));
                section.as_object_mut().expect("a section is an object")
            }
        };
        object.insert(line.key.clone(), line.value.clone());
    }
    format!("{:#}\n", Json::Object(top))
}

fn yaml(lines: &[Line]) -> String {
    let mut text = String::new();
    let mut section = None;
    for line in lines {
        if line.section != section {
            section = line.section;
            let _ = writeln!(text, "{}:", section.unwrap_or_default());
        }
        let indent = if section.is_some() { "  " } else { "" };
        for comment in line.comment.iter().flat_map(|comment| comment.lines()) {
            let _ = writeln!(text, "{indent}# {comment}");
        }
        let _ = writeln!(text, "{indent}{}: {}", line.key, yaml_value(&line.value));
    }
    text
}

/// Quotes whatever some YAML might take for something else than text.
fn yaml_value(value: &Json) -> String {
    const NAMES: [&str; 12] = [
        "y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "nan", "inf",
    ];
    match value {
        Json::String(text) => {
            let is_letter = |letter: char| letter.is_ascii_alphabetic() || letter == '_' || letter == '/';
            let is_plain = text.starts_with(is_letter)
                && text
                    .chars()
                    .all(|letter| is_letter(letter) || letter.is_ascii_digit() || "-.,".contains(letter))
                && !NAMES.iter().any(|name| name.eq_ignore_ascii_case(text));
            if is_plain { text.clone() } else { value.to_string() }
        }
        // Braces of JSON are YAML.
        value => value.to_string(),
    }
}

fn toml(lines: &[Line]) -> String {
    let mut text = String::new();
    let mut section = None;
    for line in lines {
        if line.section != section {
            section = line.section;
            let _ = writeln!(text, "\n[{}]", section.unwrap_or_default());
        }
        for comment in line.comment.iter().flat_map(|comment| comment.lines()) {
            let _ = writeln!(text, "# {comment}");
        }
        // TOML has no null: such a key says nothing.
        if !line.value.is_null() {
            let _ = writeln!(text, "{} = {}", line.key, toml_value(&line.value));
        }
    }
    text
}

fn toml_value(value: &Json) -> String {
    match value {
        Json::Object(keys) => {
            let keys = keys.iter().filter(|(_, value)| !value.is_null());
            let keys = keys.map(|(key, value)| format!("{} = {}", Json::from(key.as_str()), toml_value(value)));
            format!("{{ {} }}", Vec::from_iter(keys).join(", "))
        }
        Json::Array(items) => format!("[{}]", Vec::from_iter(items.iter().map(toml_value)).join(", ")),
        value => value.to_string(),
    }
}
