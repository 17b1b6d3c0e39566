//! Why no estimate can be made.

use crate::CheckpointError;
use std::path::PathBuf;

/// A model that cannot be read, or a run that cannot be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EstimateError {
    /// There is nothing at the path.
    #[error(
        "{}: there is no such file or folder; give a model folder, its config.json, safetensors files, or a checkpoint", .0.display()
    )]
    Missing(PathBuf),
    /// A file could not be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A configuration that is malformed, or holds sizes that cannot be.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what was expected.
        reason: String,
    },
    /// A folder or file without anything that tells of a model.
    #[error("{}: {reason}", path.display())]
    NoModel {
        /// Where was looked.
        path: PathBuf,
        /// What was expected.
        reason: String,
    },
    /// A weight file that is damaged or of another format.
    #[error(transparent)]
    Weights(Box<sconce_zero::Error>),
    /// A damaged checkpoint.
    #[error(transparent)]
    Checkpoint(Box<CheckpointError>),
    /// A combination that no run can have.
    #[error(transparent)]
    Run(Box<crate::Error>),
}

impl From<sconce_zero::Error> for EstimateError {
    fn from(error: sconce_zero::Error) -> Self {
        Self::Weights(Box::new(error))
    }
}

impl From<CheckpointError> for EstimateError {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

impl From<crate::Error> for EstimateError {
    fn from(error: crate::Error) -> Self {
        Self::Run(Box::new(error))
    }
}
