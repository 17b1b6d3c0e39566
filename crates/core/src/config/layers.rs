//! What each source says, and all of them together.

use super::configuration::Configured;
use super::settings::{ACCUMULATION_STEPS, DISTRIBUTED_TYPE, SETTINGS, setting};
use super::{Configuration, ConfigurationError, Origin, Setting, Value};
use crate::environment as variable;

/// Flags that say how state is spread, without dashes.
const PARADIGM_FLAGS: [(&str, &str); 3] = [
    ("use_deepspeed", "DEEPSPEED"),
    ("use_fsdp", "FSDP"),
    ("multi_gpu", "MULTI_GPU"),
];
/// Variables that say so.
const PARADIGM_VARIABLES: [(&str, &str); 2] = [
    (variable::ACCELERATE_USE_DEEPSPEED, "DEEPSPEED"),
    (variable::ACCELERATE_USE_FSDP, "FSDP"),
];

impl Configuration {
    /// Takes what the command line says: names of flags without dashes, with their values; a switch has none. Flags that
    /// are no settings are passed over.
    ///
    /// # Errors
    /// A value that is none of its setting.
    pub fn from_flags<'f>(
        flags: impl IntoIterator<Item = (&'f str, Option<&'f str>)>,
    ) -> Result<Self, ConfigurationError> {
        let mut configuration = Self::new();
        for (flag, text) in flags {
            let origin = || Origin::Flag(format!("--{flag}"));
            if let Some((_, paradigm)) = PARADIGM_FLAGS.iter().find(|(name, _)| *name == flag) {
                configuration.put(DISTRIBUTED_TYPE, Value::from(*paradigm), origin());
                continue;
            }
            let Some(setting) = SETTINGS.iter().find(|setting| setting.flag == Some(flag)) else {
                continue;
            };
            let value = read(setting, text.unwrap_or("true"), &origin())?;
            configuration.put(setting.path, value, origin());
        }
        Ok(configuration)
    }

    /// Takes what the environment says.
    ///
    /// # Errors
    /// A value that is none of its setting.
    pub fn from_environment(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigurationError> {
        let given = |name: &str| lookup(name).filter(|text| !text.trim().is_empty());
        let mut configuration = Self::new();
        for (name, paradigm) in PARADIGM_VARIABLES {
            if is_true(given(name)) == Some(true) {
                configuration.put(DISTRIBUTED_TYPE, Value::from(paradigm), Origin::Variable(name));
            }
        }
        for setting in SETTINGS {
            let Some((name, text)) = setting.variable.and_then(|name| Some((name, given(name)?))) else {
                continue;
            };
            // Accelerate writes `none` where there is no value.
            if text.trim() == "none" && !setting.path.ends_with("_device") {
                continue;
            }
            let value = read(setting, &text, &Origin::Variable(name))?;
            configuration.put(setting.path, value, Origin::Variable(name));
        }
        Ok(configuration)
    }

    /// Says what holds where nobody says anything.
    pub fn defaults() -> Self {
        let mut configuration = Self::new();
        for setting in SETTINGS {
            let value = setting.default.and_then(|text| setting.kind.read_text(text));
            if let Some(value) = value {
                configuration.put(setting.path, value, Origin::Default);
            }
        }
        configuration
    }

    /// Puts what files say beneath what the command line (`self`) and the environment say.
    ///
    /// # Errors
    /// As [`Self::from_environment`].
    pub fn over_environment_and_files(
        self,
        lookup: impl Fn(&str) -> Option<String>,
        files: Self,
    ) -> Result<Self, ConfigurationError> {
        let paradigm_of_flags = self.get(DISTRIBUTED_TYPE).is_some();
        let mut merged = self.or(Self::from_environment(&lookup)?).or(files);
        // A variable that turns off what a file turns on.
        if !paradigm_of_flags && let Some(given) = merged.get(DISTRIBUTED_TYPE).cloned() {
            for (name, paradigm) in PARADIGM_VARIABLES {
                if given.value.as_text() == Some(paradigm) && is_true(lookup(name)) == Some(false) {
                    merged.put(DISTRIBUTED_TYPE, Value::from("NO"), Origin::Variable(name));
                }
            }
        }
        Ok(merged)
    }

    /// Returns what files say, nobody else does, and has an effect.
    ///
    /// # Errors
    /// As [`Self::paradigm`].
    pub fn of_files(&self) -> Result<Vec<(&'static Setting, &Configured)>, ConfigurationError> {
        let mut of_files = Vec::new();
        for (setting, configured) in self.iter() {
            if matches!(configured.origin, Origin::File(_)) && self.counts(setting)? {
                of_files.push((setting, configured));
            }
        }
        Ok(of_files)
    }

    /// Returns the value of `ACCELERATE_CONFIG_DS_FIELDS`: the keys of a file's DeepSpeed section that no flag overrules,
    /// by which Accelerate finds what is said twice.
    pub fn deepspeed_fields(&self) -> String {
        let is_of_file = |path: &str| {
            let given = self.get(path);
            given.is_none_or(|given| matches!(given.origin, Origin::File(_)))
        };
        let fields = self.deepspeed_fields.iter().map(String::as_str);
        let fields = fields.filter(|key| match *key {
            "gradient_accumulation_steps" => is_of_file(ACCUMULATION_STEPS),
            key => is_of_file(&format!("deepspeed_config.{key}")),
        });
        let precision = self
            .get("mixed_precision")
            .filter(|given| matches!(given.origin, Origin::File(_)));
        let precision = precision.map(|_| "mixed_precision");
        Vec::from_iter(fields.chain(precision)).join(",")
    }

    fn put(&mut self, path: &'static str, value: Value, origin: Origin) {
        if let Some(setting) = setting(path) {
            self.insert(setting, Configured { value, origin });
        }
    }
}

fn read(setting: &Setting, text: &str, origin: &Origin) -> Result<Value, ConfigurationError> {
    setting.kind.read_text(text).ok_or_else(|| ConfigurationError::Value {
        place: origin.to_string(),
        found: text.into(),
        expected: setting.kind.expected(),
    })
}

fn is_true(text: Option<String>) -> Option<bool> {
    super::Kind::Flag.read_text(&text?)?.as_flag()
}
