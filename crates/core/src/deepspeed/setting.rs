//! A value that the file may leave to the program.

use super::ConfigError;

/// A value, or the word `"auto"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting<T> {
    /// [`DeepSpeedConfig::fill`](super::DeepSpeedConfig::fill) puts a value here.
    Auto,
    /// The value of the file, or DeepSpeed's default.
    Given(T),
}

impl<T: Copy> Setting<T> {
    /// Returns the value, or `None` where it is still `"auto"`.
    pub fn value(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Given(value) => Some(value),
        }
    }

    /// Returns the value; `path` names the key in the message.
    ///
    /// # Errors
    /// [`ConfigError::StillAuto`] when it is still `"auto"`.
    pub fn filled(self, path: &str) -> Result<T, ConfigError> {
        self.value().ok_or_else(|| ConfigError::StillAuto {
            file: "DeepSpeed configuration".into(),
            paths: vec![path.into()],
        })
    }
}
