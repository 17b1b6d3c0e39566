//! The tree of settings: every one optional, each with who gave it.

use super::setting::Setting;
use super::settings::{ACCUMULATION_STEPS, DEEPSPEED, DISTRIBUTED_TYPE, FP8, FSDP, PARALLELISM, SETTINGS, setting};
use super::{ConfigurationError, Origin, Value, Warning};
use crate::nearest::nearest;
use std::collections::BTreeMap;

/// A value, and who gave it.
#[derive(Debug, Clone, PartialEq)]
pub struct Configured {
    /// The value.
    pub value: Value,
    /// Who gave it.
    pub origin: Origin,
}

/// How training state is spread over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paradigm {
    /// Every rank holds all of it.
    Replicated,
    /// As DeepSpeed's settings say.
    DeepSpeed,
    /// As FSDP's settings say.
    Fsdp,
}

/// What is said of a run, by whomever; what nobody says is absent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Configuration {
    values: BTreeMap<&'static str, Configured>,
    warnings: Vec<Warning>,
    /// Keys of `deepspeed_config` as a file has them, in its order: Accelerate tells its ranks.
    pub(super) deepspeed_fields: Vec<String>,
}

impl Configuration {
    /// Makes a configuration that says nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the value of a setting, and who gave it.
    pub fn get(&self, path: &str) -> Option<&Configured> {
        self.values.get(setting(path)?.path)
    }

    /// Returns the value of a setting.
    pub fn value(&self, path: &str) -> Option<&Value> {
        self.get(path).map(|configured| &configured.value)
    }

    /// Sets a value, as code; `text` is what a file would have.
    ///
    /// # Errors
    /// A key that is none, or a text that is no such value.
    pub fn set(&mut self, path: &str, text: &str) -> Result<(), ConfigurationError> {
        let setting = known(path, Origin::Code)?;
        let value = setting.kind.read_text(text).ok_or_else(|| ConfigurationError::Value {
            place: path.into(),
            found: text.into(),
            expected: setting.kind.expected(),
        })?;
        let origin = Origin::Code;
        self.insert(setting, Configured { value, origin });
        Ok(())
    }

    /// Removes a value and returns it.
    pub fn remove(&mut self, path: &str) -> Option<Configured> {
        self.values.remove(setting(path)?.path)
    }

    pub(super) fn insert(&mut self, setting: &'static Setting, configured: Configured) {
        self.values.insert(setting.path, configured);
    }

    pub(super) fn warn(&mut self, warning: Warning) {
        self.warnings.push(warning);
    }

    /// Returns what a reader should know of the files.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Returns the settings that have a value, in the order of [`SETTINGS`].
    pub fn iter(&self) -> impl Iterator<Item = (&'static Setting, &Configured)> {
        let given = |setting: &'static Setting| Some((setting, self.values.get(setting.path)?));
        SETTINGS.iter().filter_map(given)
    }

    /// Says whether nothing is said.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Takes from `other` what this configuration does not say.
    #[must_use]
    pub fn or(mut self, other: Self) -> Self {
        for (path, configured) in other.values {
            self.values.entry(path).or_insert(configured);
        }
        if self.deepspeed_fields.is_empty() {
            self.deepspeed_fields = other.deepspeed_fields;
        }
        self.warnings.extend(other.warnings);
        self
    }

    /// Returns how state is spread: as `distributed_type` says, or the one of the two sections that is there.
    ///
    /// # Errors
    /// Both sections without a `distributed_type`.
    pub fn paradigm(&self) -> Result<Paradigm, ConfigurationError> {
        if let Some(configured) = self.get(DISTRIBUTED_TYPE) {
            return Ok(match configured.value.as_text() {
                Some("DEEPSPEED") => Paradigm::DeepSpeed,
                Some("FSDP") => Paradigm::Fsdp,
                _ => Paradigm::Replicated,
            });
        }
        // Steps of accumulation count whatever shards.
        let first = |section| {
            let mut of_section = self.iter().filter(|(setting, configured)| {
                setting.path != ACCUMULATION_STEPS && section_of(setting, configured) == Some(section)
            });
            of_section.find(|(_, configured)| matches!(configured.origin, Origin::File(_) | Origin::Code))
        };
        match (first(DEEPSPEED), first(FSDP)) {
            (Some((_, deepspeed)), Some((_, fsdp))) => Err(ConfigurationError::Conflict {
                first: deepspeed.origin.to_string(),
                second: fsdp.origin.to_string(),
                advice: "say which of them shards: distributed_type, DEEPSPEED or FSDP".into(),
            }),
            (Some(_), None) => Ok(Paradigm::DeepSpeed),
            (None, Some(_)) => Ok(Paradigm::Fsdp),
            (None, None) => Ok(Paradigm::Replicated),
        }
    }

    /// Says whether a setting has an effect beside the others: those of DeepSpeed, FSDP, its mesh and fp8 count only
    /// where that is in use.
    ///
    /// # Errors
    /// As [`Self::paradigm`].
    pub fn counts(&self, setting: &Setting) -> Result<bool, ConfigurationError> {
        let Some(configured) = self.values.get(setting.path) else {
            return Ok(false);
        };
        Ok(match section_of(setting, configured) {
            Some(DEEPSPEED) => self.paradigm()? == Paradigm::DeepSpeed,
            Some(FSDP | PARALLELISM) => self.paradigm()? == Paradigm::Fsdp,
            Some(FP8) => self.value("mixed_precision").and_then(Value::as_text) == Some("fp8"),
            None if ["machine_rank", "rdzv_backend", "same_network"].contains(&setting.path) => self.several_machines(),
            _ => true,
        })
    }

    /// Says whether more than one machine takes part.
    pub fn several_machines(&self) -> bool {
        match self.value("num_machines") {
            Some(Value::Whole(machines)) => *machines > 1,
            Some(Value::Text(range)) => range != "1:1",
            _ => false,
        }
    }
}

/// The section in which a value stands: that of its key in the file, where a key has several names.
fn section_of(setting: &Setting, configured: &Configured) -> Option<&'static str> {
    if let Origin::File(place) = &configured.origin
        && place.path.starts_with(DEEPSPEED)
    {
        return Some(DEEPSPEED);
    }
    setting.section()
}

/// Returns a setting by its key.
pub(super) fn known(path: &str, place: impl std::fmt::Display) -> Result<&'static Setting, ConfigurationError> {
    setting(path).ok_or_else(|| ConfigurationError::UnknownKey {
        place: format!("{place}: `{path}`"),
        nearest: nearest(path, SETTINGS.iter().map(|setting| setting.path)).map(str::to_owned),
    })
}
