//! Trackers by their names, as a command line gives them.

use super::{Csv, DvcLive, JsonLines, MlflowFiles, TensorBoard, Tracker, TrackerError, WandbOffline};
#[cfg(feature = "mlflow")]
use crate::environment::MLFLOW_TRACKING_TOKEN;
use crate::environment::MLFLOW_TRACKING_URI;
use crate::nearest::nearest;
use sconce_collectives::environment::of_process;
use std::path::Path;

/// The names of all trackers that are built in.
#[cfg(not(feature = "trackio"))]
pub const NAMES: [&str; 6] = ["jsonl", "csv", "tensorboard", "wandb", "mlflow", "dvclive"];
/// The names of all trackers that are built in.
#[cfg(feature = "trackio")]
pub const NAMES: [&str; 7] = ["jsonl", "csv", "tensorboard", "wandb", "mlflow", "dvclive", "trackio"];

/// Makes a tracker that is built in and writes below `folder`.
///
/// # Errors
/// [`TrackerError::Unknown`]; [`TrackerError::Refused`] for trackers that Accelerate has, and Sconce, or this build of it, has
/// not.
pub fn tracker_from_name(name: &str, folder: impl AsRef<Path>) -> Result<Box<dyn Tracker>, TrackerError> {
    let folder = folder.as_ref();
    Ok(match name {
        "jsonl" => JsonLines::boxed(folder),
        "csv" => Csv::boxed(folder),
        "tensorboard" => TensorBoard::boxed(folder),
        "wandb" => WandbOffline::boxed(folder),
        "mlflow" => mlflow(folder, of_process)?,
        "dvclive" => DvcLive::boxed(folder),
        #[cfg(feature = "trackio")]
        "trackio" => super::Trackio::boxed(folder),
        _ => return Err(refusal(name)),
    })
}

/// Files, or the server that the environment names as it does for MLflow's own programs.
fn mlflow(folder: &Path, environment: impl Fn(&str) -> Option<String>) -> Result<Box<dyn Tracker>, TrackerError> {
    let server = environment(MLFLOW_TRACKING_URI).filter(|address| address.starts_with("http"));
    #[cfg(feature = "mlflow")]
    if let Some(address) = server {
        let server = super::MlflowServer::new(address);
        return Ok(Box::new(match environment(MLFLOW_TRACKING_TOKEN) {
            Some(token) => server.token(token),
            None => server,
        }));
    }
    #[cfg(not(feature = "mlflow"))]
    if server.is_some() {
        return Err(TrackerError::Refused {
            name: "mlflow".into(),
            reason: "MLFLOW_TRACKING_URI names a server: build with the feature `mlflow` of sconce-core, or unset it to \
                     write files",
        });
    }
    Ok(MlflowFiles::boxed(folder))
}

fn refusal(name: &str) -> TrackerError {
    let reason = match name {
        "trackio" => "it needs SQLite: build with the feature `trackio` of sconce-core, or use jsonl",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mlflow_is_the_server_that_the_environment_names_or_a_refusal_to_write_elsewhere() {
        let mlflow = |address: &str| mlflow(Path::new("logs"), |_| Some(address.into()));
        // Other stores are the server's own affair.
        let files = mlflow("sqlite:///mlflow.db").unwrap();
        assert!(format!("{files:?}").starts_with("MlflowFiles"));
        let server = mlflow("http://127.0.0.1:5000");
        if cfg!(feature = "mlflow") {
            let said = format!("{:?}", server.unwrap());
            assert!(
                said.starts_with("MlflowServer") && said.contains("token: Some(Secret(..))"),
                "{said}"
            );
        } else {
            assert!(server.unwrap_err().to_string().contains("with the feature `mlflow`"));
        }
    }
}
