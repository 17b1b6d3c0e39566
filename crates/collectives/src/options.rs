//! How a communicator behaves when something goes wrong.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of a group of ranks; the same on all ranks, but for the GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// How long an operation waits for its peers; 30 minutes by default, as in PyTorch.
    pub timeout: Duration,
    /// Folder into which the last operations are written when something fails; `None`: nowhere.
    pub flight_recorder: Option<PathBuf>,
    /// The GPU that this rank computes on, by its number among those that the process may use; `None`: the CPU. For the
    /// backend `nccl`.
    pub gpu: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30 * 60),
            flight_recorder: None,
            gpu: None,
        }
    }
}
