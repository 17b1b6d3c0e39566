//! What a run is, as files, the command line and the environment say it: one tree of settings, each with who gave it.
//!
//! Whoever is first in this order wins, setting by setting: the program's code, the command line, the environment
//! (`ACCELERATE_*`, `FSDP_*`, `SCONCE_*`), files, defaults. Of several files a later one wins over an earlier one. What a
//! DeepSpeed configuration decides is not overruled in silence: see [`deepspeed`](crate::deepspeed).
//!
//! A file is Accelerate's (YAML, or JSON under any name, of every version), a DeepSpeed configuration, or our own, which has
//! the same keys and the section `sconce_config`, also as TOML. Ranks do not read these files: `sconce launch` does, and
//! tells them by the variables that they read in any case.
//!
//! In reading order: what a setting is ([`Setting`]) and which there are ([`SETTINGS`]); a file as a tree (`document.rs`) and
//! that as settings ([`Configuration::read`]), with what is known of Accelerate's other keys (`foreign_keys.rs`)
//! and of DeepSpeed's (`inline_deepspeed.rs`); all that is said by whomever ([`Configuration::over_environment_and_files`]).
//!
//! ```
//! use sconce_core::config::{Configuration, Format, Value};
//!
//! let text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n";
//! let configuration = Configuration::parse(text, "run.yaml", Format::Yaml)?;
//! let version = configuration.get("fsdp_config.fsdp_version").expect("the file says so");
//! assert_eq!((&version.value, version.origin.to_string().as_str()), (&Value::from("2"), "run.yaml:3: `fsdp_config.fsdp_version`"));
//! # Ok::<(), sconce_core::config::ConfigurationError>(())
//! ```

mod configuration;
mod default_file;
mod document;
mod error;
mod foreign_keys;
mod fsdp2;
mod inline_deepspeed;
mod layers;
mod origin;
mod read;
mod schema;
mod setting;
mod settings;
mod toml_text;
mod value;
mod warning;
mod write;
mod yaml;

pub use configuration::{Configuration, Configured, Paradigm};
pub use default_file::default_file;
pub use document::Format;
pub use error::ConfigurationError;
pub use fsdp2::Converted;
pub use origin::{Origin, Place};
pub use schema::schema;
pub use setting::Setting;
pub use settings::{
    ACCUMULATION_STEPS, DEEPSPEED, DEEPSPEED_FILE, DISTRIBUTED_TYPE, FP8, FSDP, MPIRUN, PARALLELISM, SCONCE, SETTINGS,
    setting,
};
pub use value::{Kind, Value};
pub use warning::Warning;
pub use write::Comment;
