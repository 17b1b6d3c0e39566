//! What can go wrong with a checkpoint.

use std::path::{Path, PathBuf};

/// A checkpoint that cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// A file or folder cannot be used.
    #[error("checkpoint, {}: {reason}", path.display())]
    Unusable {
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        reason: String,
    },
    /// A file is damaged.
    #[error("checkpoint, {}: tensor {tensor:?}: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The tensor in it.
        tensor: String,
        /// What does not fit.
        reason: String,
    },
    /// No folder has a complete checkpoint.
    #[error("no complete checkpoint in {}{}", folder.display(), if skipped.is_empty() { String::new() } else { format!(": {}", skipped.join("; ")) })]
    NoneComplete {
        /// Where they were looked for.
        folder: PathBuf,
        /// What was found, and why it is none.
        skipped: Vec<String>,
    },
    /// It is a checkpoint of another system.
    #[error("{foreign}")]
    Foreign {
        /// What it is, and how it becomes safetensors.
        foreign: sconce_zero::ForeignWeights,
    },
    /// Something is asked for that the checkpoint does not have.
    #[error("checkpoint, {}: {reason}", path.display())]
    Lacks {
        /// The checkpoint.
        path: PathBuf,
        /// What is not there, and what is.
        reason: String,
    },
    /// A hook of the program's failed.
    #[error("checkpoint, {}: {what}, hook {number}: {source}", path.display())]
    Hook {
        /// The folder that it was given.
        path: PathBuf,
        /// When it was called.
        what: &'static str,
        /// Its number among those registered, from 0.
        number: usize,
        /// Its own error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The checkpoint is of another model.
    #[error("checkpoint, {}: it is of another model: {}", path.display(), differences.join("; "))]
    AnotherModel {
        /// The checkpoint.
        path: PathBuf,
        /// One difference each.
        differences: Vec<String>,
    },
}

impl CheckpointError {
    pub(super) fn unusable(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::Unusable {
            path: path.into(),
            reason: reason.to_string(),
        }
    }
}
