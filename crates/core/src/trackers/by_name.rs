//! Trackers by their names, as a command line gives them.

use crate::nearest::nearest;
use super::{Csv, DvcLive, JsonLines, MlflowFiles, TensorBoard, Tracker, TrackerError, WandbOffline};
use std::path::Path;

/// The names of all trackers that are built in.
pub const NAMES: [&str; 6] = ["jsonl", "csv", "tensorboard", "wandb", "mlflow", "dvclive"];

/// Makes a tracker that is built in and writes below `folder`.
///
/// # Errors
/// [`TrackerError::Unknown`]; [`TrackerError::Refused`] for trackers that Accelerate has, and Sconce has not.
pub fn tracker_from_name(name: &str, folder: impl AsRef<Path>) -> Result<Box<dyn Tracker>, TrackerError> {
    let folder = folder.as_ref();
    Ok(match name {
        "jsonl" => JsonLines::boxed(folder),
        "csv" => Csv::boxed(folder),
        "tensorboard" => TensorBoard::boxed(folder),
        "wandb" => WandbOffline::boxed(folder),
        "mlflow" => MlflowFiles::boxed(folder),
        "dvclive" => DvcLive::boxed(folder),
        _ => return Err(refusal(name)),
    })
}

fn refusal(name: &str) -> TrackerError {
    let reason = match name {
        "trackio" => "it keeps runs in an SQLite database; use jsonl or csv",
        "comet_ml" | "clearml" | "swanlab" => "it is a service with a client of its own; use tensorboard or mlflow",
        "aim" => "it has a store of its own; use tensorboard, which `aim convert tensorboard` reads",
        _ => {
            return TrackerError::Unknown {
                name: name.into(),
                nearest: nearest(name, NAMES),
                known: NAMES.join(", "),
            };
        }
    };
    TrackerError::Refused {
        name: name.into(),
        reason,
    }
}
