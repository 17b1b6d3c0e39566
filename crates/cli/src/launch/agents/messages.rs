//! What launchers tell each other: reports to the coordinator, and its orders. As JSON, which a debugger can read.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a member tells the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Report {
    /// A launcher is there and would take part.
    Hello(Hello),
    /// Something here stops the round: a rank has failed.
    Failed { id: String, round: usize, failure: Failure },
    /// All of this member's ranks have ended.
    Ended {
        id: String,
        round: usize,
        is_success: bool,
        /// What is known about how they ended, for the last words on the run.
        details: String,
    },
    /// Somebody asks this launcher to stop.
    Leaving { id: String, signal: String, code: u8 },
    /// This launcher has read the order to leave or to end.
    Gone { id: String },
}

/// A launcher as it introduces itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hello {
    /// A random text that names this process among all.
    pub(super) id: String,
    pub(super) host: String,
    pub(super) pid: u32,
    /// `--machine_rank`, where given.
    pub(super) machine: Option<usize>,
    /// Whether it hosts the store, which makes it machine 0.
    pub(super) is_host: bool,
    /// What must be the same on all machines: what it is, and how this launcher was told it.
    pub(super) terms: Vec<(String, String)>,
}

/// What made a round fail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Failure {
    /// Who: for example `rank 3 (pid 77)`.
    pub(super) who: String,
    /// What happened: for example `exited with code 3 after 1.2 s`.
    pub(super) what: String,
    /// The exit code that tells it.
    pub(super) code: u8,
}

/// What the coordinator tells the members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Order {
    /// Start the ranks of a round.
    Start(Start),
    /// Stop the ranks of the round.
    Stop { round: usize },
    /// Tell who reads the launchers' output, where there were ranks before.
    Announce { text: String },
    /// One launcher is to leave.
    Leave { id: String, farewell: Farewell },
    /// The run is over.
    End(Farewell),
}

/// A round as all members must know it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Start {
    pub(super) run_id: String,
    pub(super) round: usize,
    pub(super) restarts: usize,
    /// The members' IDs, by machine number.
    pub(super) members: Vec<String>,
    /// MASTER_PORT, on machine 0.
    pub(super) main_port: u16,
    /// The port of the ranks' store, on machine 0.
    pub(super) store_port: u16,
}

/// With what a launcher ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Farewell {
    /// What is told on stderr; may be empty.
    pub(super) text: String,
    pub(super) code: u8,
}

impl fmt::Display for Hello {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.is_host, self.machine) {
            (true, _) => write!(formatter, "machine 0")?,
            (false, Some(machine)) => write!(formatter, "machine {machine}")?,
            (false, None) => write!(formatter, "a machine")?,
        }
        write!(formatter, " (host {}, launcher {})", self.host, self.pid)
    }
}
