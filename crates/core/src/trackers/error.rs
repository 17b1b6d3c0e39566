//! What can go wrong with a tracker.

use std::path::{Path, PathBuf};

/// A tracker that cannot be had, or cannot write.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackerError {
    /// No tracker has this name.
    #[error("tracker {name:?} is not known{hint}; known are {known} and all", hint = nearest.as_ref().map_or(String::new(), |nearest| format!(" (did you mean {nearest:?}?)")))]
    Unknown {
        /// What was asked for.
        name: String,
        /// The known name that is nearest to it.
        nearest: Option<&'static str>,
        /// All known names.
        known: String,
    },
    /// A tracker of this name exists elsewhere, and not here.
    #[error("tracker {name:?} is not built in: {reason}")]
    Refused {
        /// What was asked for.
        name: String,
        /// Why not, and what to use instead.
        reason: &'static str,
    },
    /// A project, a value or an image cannot be written under its name.
    #[error("the name {name:?}: {reason}")]
    Name {
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The configuration of a run is no set of named values.
    #[error("the configuration of a run: {reason}; give a struct, a map, or () for none")]
    Config {
        /// What it is instead.
        reason: String,
    },
    /// What is to be an image is none.
    #[error("image {name:?}: {reason}; give the bytes of a PNG file")]
    Image {
        /// The image's name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A file or folder cannot be used.
    #[error("{}: {source}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// The system's own error.
        source: std::io::Error,
    },
    /// An existing file is not one that this tracker can go on with.
    #[error("{}: {reason}; move it away, or log to another folder", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A server cannot be used.
    #[error("{address}: {reason}")]
    Server {
        /// Where it is.
        address: String,
        /// What it said, or did not say.
        reason: String,
    },
    /// A tracker failed, in a run that is to stop for that.
    #[error("tracker {tracker}: {source}")]
    Failed {
        /// Which one.
        tracker: String,
        /// Its own error.
        source: Box<Self>,
    },
    /// An error of a tracker that is not built in.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

impl TrackerError {
    /// Returns a function that says where an error of the system happened.
    pub(super) fn at(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        |source| Self::File { path, source }
    }
}
