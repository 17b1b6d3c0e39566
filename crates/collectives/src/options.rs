//! How a communicator behaves when something goes wrong.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of a group of ranks; the same on all ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// How long an operation waits for its peers; 30 minutes by default, as in PyTorch.
    pub timeout: Duration,
    /// Folder into which the last operations are written when something fails; `None`: nowhere.
    pub flight_recorder: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30 * 60),
            flight_recorder: None,
        }
    }
}
