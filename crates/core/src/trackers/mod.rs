//! Experiment trackers: where a run's numbers go, so that runs can be looked at and compared later.
//!
//! Only the main process writes; on the other ranks all calls do nothing, and no call speaks with another rank. A tracker
//! that fails is left out from then on, with one warning: training never stops for it, unless that is asked for
//! ([`Trackers::strict`]). What was logged before a crash can be read: every call of
//! [`log`](../trait.Accelerator.html#method.log) is handed to the operating system before it returns (a server of MLflow gets it
//! moments later).
//!
//! ```
//! use sconce_core::trackers::{JsonLines, Trackers};
//!
//! let folder = tempfile::tempdir()?;
//! let acc = sconce_core::accelerator()?;
//! let config = serde_json::json!({"lr": 1e-3, "model": {"layers": 2}});
//! acc.init_trackers("demo", &config, vec![JsonLines::boxed(folder.path())])?;
//! acc.log(&[("loss", 2.5), ("lr", 1e-3)], 0)?;
//! acc.end_training()?;
//! # let text = std::fs::read_to_string(folder.path().join("demo/metrics.jsonl"))?;
//! # assert!(text.contains("\"loss\":2.5"), "{text}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | name | what is written | scalars | text | images | histograms |
//! | --- | --- | --- | --- | --- | --- |
//! | `jsonl` ([`JsonLines`]) | `PROJECT/metrics.jsonl`, what `sconce report` reads | yes | yes | | |
//! | `csv` ([`Csv`]) | `PROJECT/metrics.csv` | yes | | | |
//! | `tensorboard` ([`TensorBoard`]) | `PROJECT/events.out.tfevents.*` | as f32 | yes | yes | yes |
//! | `mlflow` ([`MlflowFiles`]) | `mlruns/EXPERIMENT/RUN`, MLflow's store of files | yes | yes | yes | |
//! | `wandb` ([`WandbOffline`]) | `wandb/offline-run-*`, what `wandb sync` uploads | yes | yes | yes | yes |
//! | `dvclive` ([`DvcLive`]) | `dvclive/`, as DVCLive writes it | yes | | yes | |
//!
//! With the feature `trackio` there is also `trackio` (`Trackio`), which writes Trackio's SQLite store `trackio/PROJECT.db`: all of
//! the four. With the feature `mlflow`, and `MLFLOW_TRACKING_URI` an address such as `http://127.0.0.1:5000`, `mlflow` is a
//! server (`MlflowServer`) that gets scalars, with the token `MLFLOW_TRACKING_TOKEN` if there is one.
//!
//! Other services that need a network or a program of their own are refused by name, with what to use instead
//! ([`tracker_from_name`]). A tracker of one's own implements [`Tracker`].

mod append_file;
mod by_name;
mod calendar;
mod csv;
mod dvclive;
mod error;
mod files_by_name;
mod histogram;
mod json_lines;
mod logging;
mod mlflow;
#[cfg(feature = "mlflow")]
mod mlflow_server;
mod name_path;
mod png;
mod tensorboard;
mod tracker;
mod tracker_list;
#[cfg(feature = "trackio")]
mod trackio;
mod wandb;
mod yaml;

pub use by_name::{NAMES, tracker_from_name};
pub use csv::Csv;
pub use dvclive::DvcLive;
pub use error::TrackerError;
pub use json_lines::JsonLines;
pub use mlflow::MlflowFiles;
#[cfg(feature = "mlflow")]
pub use mlflow_server::MlflowServer;
pub use tensorboard::TensorBoard;
pub use tracker::{Moment, Run, Tracker};
pub use tracker_list::Trackers;
#[cfg(feature = "trackio")]
pub use trackio::Trackio;
pub use wandb::WandbOffline;
