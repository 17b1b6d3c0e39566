//! The one error type of this crate.

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can be wrong with what is asked of fully sharded data parallelism.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting has a value that it cannot have, alone or beside the others.
    #[error("{setting}={value:?}: {expected}")]
    Setting {
        /// Its name in FSDP's terms, for example `reshard_after_forward`.
        setting: &'static str,
        /// Its value.
        value: String,
        /// What was expected, and what to do.
        expected: String,
    },
    /// A wrap policy names classes that no part of the model has.
    #[error(
        "transformer_layer_cls_to_wrap: no part of the model has the class {}; {}",
        missing.join(" or "),
        match known.as_slice() {
            [] => "it declares no part with a class: build its parts with `unit_of_class`".to_owned(),
            known => format!("it declares parts of {}", known.join(", ")),
        }
    )]
    UnknownClasses {
        /// The classes that no part has.
        missing: Vec<String>,
        /// The classes that there are.
        known: Vec<String>,
    },
}
