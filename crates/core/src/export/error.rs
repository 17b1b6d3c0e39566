//! What can go wrong when weights are written for other programs.

use crate::checkpoint::CheckpointError;
use std::path::{Path, PathBuf};

/// Weights that cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// A file or folder cannot be used, or the tensors for it do not fit.
    #[error("{}: {reason}", path.display())]
    Unusable {
        /// The file or folder.
        path: PathBuf,
        /// Why not, and what to do.
        reason: String,
    },
    /// The checkpoint from which they come cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

impl ExportError {
    pub(super) fn unusable(path: &Path, reason: impl ToString) -> Self {
        Self::Unusable {
            path: path.into(),
            reason: reason.to_string(),
        }
    }
}
