//! DeepSpeed's JSON configuration, so that a run moved here keeps its file.
//!
//! A file is read into plain typed values; nothing in it is executed, and nothing here builds an engine. Three steps:
//! [`DeepSpeedConfig::read`], then [`DeepSpeedConfig::fill`] for what the file leaves `"auto"`, then
//! [`DeepSpeedConfig::batch_sizes`] once the number of ranks is known. An accelerator takes them by itself, for the file
//! that `sconce launch --deepspeed_config_file` names or [`AcceleratorBuilder::deepspeed`](crate::AcceleratorBuilder::deepspeed)
//! is given; what comes of it is in [`RunSettings`](crate::RunSettings).
//!
//! - The sections `optimizer` and `scheduler` are used where the program gives [`ConfiguredOptimizer`] and
//!   [`ConfiguredSchedule`] to `prepare`. A section beside an optimizer or a schedule of the program's own is an error.
//!
//! - Comments (`//`, `#`, `/* */`) and commas before a closing bracket are allowed, as in DeepSpeed, whose files are HJSON;
//!   of HJSON's other freedoms (keys and texts without quotes) none is.
//! - A key that DeepSpeed knows and that means nothing on candle is a [`Warning`]. A key that it does not know is an error,
//!   also at top level, where DeepSpeed itself ignores it.
//! - A feature that changes what is trained and that this version lacks is an error where the file turns it on.
//! - The name of the file does not matter: JSON under a `.yaml` name loads.
//!
//! ```
//! use sconce_core::deepspeed::{DeepSpeedConfig, Validation};
//!
//! let text = r#"{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}"#;
//! let config = DeepSpeedConfig::parse(text, "ds_config.json", Validation::Lenient)?;
//! assert_eq!(config.batch_sizes(2)?.train, 8);
//! # Ok::<(), sconce_core::deepspeed::ConfigError>(())
//! ```

mod auto_values;
mod batch_sizes;
mod config;
mod configured;
mod deprecated;
mod encoded;
mod error;
pub(crate) mod json;
mod monitors;
mod optimizer;
mod precision;
mod scheduler;
mod section;
mod setting;
mod warning;
mod zero_optimization;

pub use auto_values::{AutoValues, MixedPrecision};
pub use batch_sizes::BatchSizes;
pub use config::{DataType, DeepSpeedConfig, GradientReduction, Validation};
pub(crate) use configured::fill;
pub use configured::{ConfiguredOptimizer, ConfiguredSchedule, OptimizerSource, ScheduleSource};
pub(crate) use encoded::encoded;
pub use error::{ConfigError, Place};
pub(crate) use json::{Node, path_of};
pub use monitors::{FileMonitor, Monitors, WandbMonitor};
pub use optimizer::{OptimizerKind, OptimizerSection};
pub use precision::{Bf16, Fp16};
pub use scheduler::{SchedulerSection, WarmupSection};
pub(crate) use section::FromNode;
pub use setting::Setting;
pub use warning::Warning;
pub use zero_optimization::{AsynchronousIo, OffloadDevice, OffloadOptimizer, OffloadParameters, ZeroOptimization};
