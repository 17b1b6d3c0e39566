//! The one error type of this crate.

use std::path::PathBuf;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong between ranks.
///
/// Each message says what was wrong, where (rank, operation, variable), what was expected and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An environment variable does not parse or holds an impossible value.
    #[error("{variable}={value:?}: {reason}")]
    Environment {
        /// The variable's name.
        variable: &'static str,
        /// Its value as found.
        value: String,
        /// What was expected, and what to do.
        reason: String,
    },
    /// An environment variable that is needed is not set.
    #[error("{variable} is not set: {reason}")]
    Unset {
        /// The variable's name.
        variable: &'static str,
        /// Why it is needed, and what to do.
        reason: String,
    },
    /// Two environment variables cannot both be true.
    #[error("{first} and {second} contradict each other: {reason}")]
    Contradiction {
        /// One side, as `NAME=value`.
        first: String,
        /// The other side, as `NAME=value`.
        second: String,
        /// Why they cannot both hold, and what to do.
        reason: String,
    },
    /// The rendezvous store refused, failed or did not answer in time.
    #[error("rendezvous store at {address}: {reason}")]
    Store {
        /// The store's address.
        address: String,
        /// What happened, and what to do.
        reason: String,
    },
    /// A text cannot serve as the rendezvous store's secret. The text itself is never repeated.
    #[error("unusable secret of the rendezvous store: {reason}")]
    Secret {
        /// What was wrong, and what to do.
        reason: String,
    },
    /// An operation was called with arguments that cannot be right on this rank alone.
    #[error("rank {rank}: {operation}: {reason}")]
    Argument {
        /// The calling rank.
        rank: usize,
        /// The operation's name.
        operation: &'static str,
        /// What was wrong and what was expected.
        reason: String,
    },
    /// Ranks called different operations; every rank of the group gets this error.
    #[error("ranks called different operations as number {sequence} of {group}: {calls}")]
    Mismatch {
        /// The operation's number in the group, from 0.
        sequence: u64,
        /// The group's name.
        group: String,
        /// Who called what, for example `rank 0: barrier; rank 1: all_reduce(sum) of 8 f32`.
        calls: String,
    },
    /// A peer died or left while this rank waited for it.
    #[error("rank {peer} {reason} while rank {rank} waited for it in {operation}")]
    PeerLost {
        /// The waiting rank.
        rank: usize,
        /// The rank that is gone.
        peer: usize,
        /// How it went: `died` or `left the group`.
        reason: &'static str,
        /// What the waiting rank was doing.
        operation: String,
    },
    /// A deadline passed.
    #[error("rank {rank} waited {seconds:.1} s in {operation} for rank(s) {missing:?}, which did not come")]
    Timeout {
        /// The waiting rank.
        rank: usize,
        /// How long it waited, in seconds.
        seconds: f64,
        /// What the waiting rank was doing.
        operation: String,
        /// The ranks it waited for.
        missing: Vec<usize>,
    },
    /// The group is unusable since an earlier failure, here or on another rank.
    #[error("the group was aborted by rank {by}: {reason}")]
    Aborted {
        /// The rank that failed first.
        by: usize,
        /// Its message.
        reason: String,
    },
    /// The MPI library refused something.
    #[error("rank {rank}: {call}: {reason}")]
    Mpi {
        /// The calling rank in the world.
        rank: usize,
        /// MPI's name of the call.
        call: &'static str,
        /// MPI's own message.
        reason: String,
    },
    /// NCCL failed, or did not end.
    #[error("rank {rank}: {call}: {reason}")]
    Nccl {
        /// The calling rank in the group.
        rank: usize,
        /// NCCL's name of the call, or what was under way.
        call: &'static str,
        /// NCCL's own message, or what happened.
        reason: String,
    },
    /// This build or machine cannot do what was asked.
    #[error("{what}: {hint}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// What to do instead.
        hint: String,
    },
    /// The operating system refused something.
    #[error("{context}: {source}")]
    Io {
        /// What was attempted.
        context: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file could not be written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// candle refused a tensor operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}
