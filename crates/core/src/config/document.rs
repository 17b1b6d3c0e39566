//! A file as a tree of values, whatever its format, with the line of each key where the format tells.

use super::{ConfigurationError, Place, Warning, toml_text, yaml};
use crate::deepspeed::{Node, Validation, json, path_of};
use crate::text_file::{Unread, read_text};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The most bytes that are read of a file.
const LARGEST: u64 = 1 << 20;

/// What a configuration file may be written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// YAML, and with it JSON.
    Yaml,
    /// JSON.
    Json,
    /// TOML.
    Toml,
}

impl Format {
    /// Tells a file's format from its name; YAML where that says nothing.
    pub fn of(file: &Path) -> Self {
        match file.extension().and_then(|ending| ending.to_str()) {
            Some("toml") => Self::Toml,
            Some("json") => Self::Json,
            _ => Self::Yaml,
        }
    }
}

/// A file that was read.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) file: String,
    pub(super) tree: Node,
    /// The line of each key, by its path.
    pub(super) lines: BTreeMap<String, usize>,
    /// Whether it is JSON, whatever its name.
    pub(super) is_json: bool,
    pub(super) warnings: Vec<Warning>,
}

impl Document {
    pub(super) fn read(file: &Path) -> Result<Self, ConfigurationError> {
        let name = file.display().to_string();
        let text = read_text(file, LARGEST).map_err(|unread| match unread {
            Unread::TooLarge => too_large(&name),
            Unread::Unreadable(source) => ConfigurationError::Unreadable {
                file: name.clone(),
                source,
            },
        })?;
        Self::parse(&text, &name, Format::of(file))
    }

    /// Reads a text; `file` names it in messages. What begins like JSON is JSON, unless it is TOML by its name.
    pub(super) fn parse(text: &str, file: &str, format: Format) -> Result<Self, ConfigurationError> {
        if text.len() as u64 > LARGEST {
            return Err(too_large(file));
        }
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let is_json = format == Format::Json || (format == Format::Yaml && begins_as_json(text));
        let mut document = Self {
            file: file.into(),
            tree: Node::Null,
            lines: BTreeMap::new(),
            is_json,
            warnings: Vec::new(),
        };
        if is_json {
            let mut repeated = Vec::new();
            match json::parse(text, file, Validation::Lenient, &mut repeated) {
                Ok(tree) => {
                    document.tree = tree;
                    let warnings = repeated.iter().map(|warning| Warning::new(file, warning.to_string()));
                    document.warnings.extend(warnings);
                    return Ok(document);
                }
                // Braces are YAML too, with freedoms that JSON does not have.
                Err(error) if format == Format::Json => return Err(error.into()),
                Err(_) => document.is_json = false,
            }
        }
        let repeated = |path: &[String]| format!("`{}` is given twice: the last is used", path_of(path));
        let placed = match format {
            Format::Toml => toml_text::parse(text, file)?,
            Format::Yaml | Format::Json => yaml::parse(text, file)?,
        };
        let mut doubles = Vec::new();
        document.tree = placed.into_tree(&mut Vec::new(), &mut document.lines, &mut |path| {
            doubles.push(repeated(path));
        });
        let warnings = doubles.into_iter().map(|message| Warning::new(file, message));
        document.warnings.extend(warnings);
        Ok(document)
    }

    pub(super) fn place(&self, path: &str) -> Place {
        Place {
            file: self.file.clone(),
            line: self.lines.get(path).copied(),
            path: path.into(),
        }
    }
}

/// A value and its line, before keys that are given twice are settled.
#[derive(Debug)]
pub(super) enum Placed {
    Scalar(Node),
    List(Vec<Self>),
    /// Key, its line, value.
    Object(Vec<(String, usize, Self)>),
}

impl Placed {
    /// Returns the tree; of a key that is given twice the last value remains, and `twice` is told.
    fn into_tree(
        self,
        path: &mut Vec<String>,
        lines: &mut BTreeMap<String, usize>,
        twice: &mut dyn FnMut(&[String]),
    ) -> Node {
        match self {
            Self::Scalar(node) => node,
            Self::List(items) => {
                let items = items.into_iter().enumerate().map(|(index, item)| {
                    path.push(index.to_string());
                    let node = item.into_tree(path, lines, twice);
                    path.pop();
                    node
                });
                Node::List(items.collect())
            }
            Self::Object(entries) => {
                let mut places = HashMap::new();
                let mut settled: Vec<(String, Node)> = Vec::with_capacity(entries.len());
                for (key, line, value) in entries {
                    path.push(key.clone());
                    let earlier = places.get(&key).copied();
                    if earlier.is_some() {
                        twice(path);
                    }
                    lines.insert(path_of(path), line);
                    let value = value.into_tree(path, lines, twice);
                    path.pop();
                    match earlier {
                        Some(place) => {
                            let entry: &mut (String, Node) = &mut settled[place];
                            entry.1 = value;
                        }
                        None => {
                            places.insert(key.clone(), settled.len());
                            settled.push((key, value));
                        }
                    }
                }
                Node::Object(settled)
            }
        }
    }
}

fn too_large(file: &str) -> ConfigurationError {
    ConfigurationError::TooLarge {
        file: file.into(),
        limit: LARGEST,
    }
}

fn begins_as_json(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim_start);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with("//") && !line.starts_with('#'));
    first.is_some_and(|line| line.starts_with('{') || line.starts_with("/*"))
}
