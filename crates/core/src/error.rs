//! The one error type of this crate.

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong in a training loop.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting, from code or from the environment, cannot be used.
    #[error("{setting}={value:?}: {expected}")]
    Setting {
        /// Its name: an environment variable, or a method of the builder.
        setting: &'static str,
        /// Its value.
        value: String,
        /// What was expected, and what to do.
        expected: String,
    },
    /// A configuration file decides what code or environment decide differently.
    #[error("{file} says otherwise: {}; remove one of the two, or write \"auto\" in the file", list.join("; "))]
    Contradictions {
        /// The file.
        file: String,
        /// One difference each: who says what, and the key and value in the file.
        list: Vec<String>,
    },
    /// Training state is asked to be sharded in two ways.
    #[error("{first} and {second} exclude each other: state is sharded in one way only; leave out one of the two")]
    Exclusive {
        /// Who asks for FSDP: an environment variable, or a method of the builder.
        first: &'static str,
        /// Who asks for something else.
        second: &'static str,
    },
    /// The device that was asked for cannot be had.
    #[error("device {device} requested, but {reason}")]
    Device {
        /// The device, for example `cuda:0`.
        device: String,
        /// What is missing, and what to do.
        reason: String,
    },
    /// A data loader cannot serve this world.
    #[error("data loader: {reason}")]
    Loader {
        /// What does not fit, and what to do.
        reason: String,
    },
    /// A data set failed to make a batch.
    #[error("data set, batch {batch} of epoch {epoch}: {source}")]
    Dataset {
        /// The batch's number on this rank, from 0.
        batch: usize,
        /// The epoch, from 0.
        epoch: u64,
        /// The data set's own error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Tensors do not have one row for each sample of the batch, or cannot be gathered in this step.
    #[error("gather_for_metrics: {reason}")]
    Metrics {
        /// What does not fit, on which rank, and what to do.
        reason: String,
    },
    /// Parts do not make up the value that is asked for; see [`Nested`](crate::Nested).
    #[error("expected {expected}, found {found}: `take_apart` and `put_together` must agree")]
    Parts {
        /// What was asked for.
        expected: &'static str,
        /// What came.
        found: String,
    },
    /// A call came at the wrong time.
    #[error("{what}: {hint}")]
    Order {
        /// What was called.
        what: &'static str,
        /// What must come first.
        hint: String,
    },
    /// Ranks were told different things: they would train on, with wrong numbers.
    #[error(
        "{what}: rank 0 has {first}; rank {rank} has {other}; start all ranks with the same arguments and environment"
    )]
    Disagreement {
        /// What they were to decide alike.
        what: &'static str,
        /// What rank 0 has decided.
        first: String,
        /// The first rank that has decided otherwise.
        rank: usize,
        /// What that is.
        other: String,
    },
    /// Work that every rank does alone failed on at least one.
    #[error("{}{message}", if *rank == 0 { String::new() } else { format!("rank {rank}: ") })]
    Together {
        /// The first rank on which it failed.
        rank: usize,
        /// That rank's message.
        message: String,
    },
    /// Work that every rank does alone failed, and rank 0 has the message.
    #[error("stopped with the other ranks; rank 0 has the message")]
    ReportedByMain,
    /// A rank that is a thread failed, the first of them to do so.
    #[error("rank {rank}: {source}")]
    Rank {
        /// The rank.
        rank: usize,
        /// Its own error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Not even a batch of one sample fits in memory.
    #[error("no executable batch size: memory ran out with every size from {start} down to 1")]
    NoBatchSize {
        /// The first size tried.
        start: usize,
    },
    /// In debug mode: ranks gave tensors of different shapes to one operation, which none of them has run.
    #[error(
        "{operation}: the ranks' tensors have different shapes: {shapes}; give tensors of one shape (see pad_across_processes)"
    )]
    Shapes {
        /// The operation.
        operation: &'static str,
        /// Every rank's shape.
        shapes: String,
    },
    /// A trace cannot be taken or written.
    #[error("profile, {}: {reason}", path.display())]
    Profile {
        /// The file, or the folder where it was to be.
        path: std::path::PathBuf,
        /// What went wrong, and what to do.
        reason: String,
    },
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] crate::checkpoint::CheckpointError),
    /// Weights cannot be written for other programs.
    #[error(transparent)]
    Export(#[from] crate::export::ExportError),
    /// An object's state cannot be saved or restored.
    #[error("the state of {name:?}: {source}")]
    Stateful {
        /// The name by which it is registered.
        name: String,
        /// Its own error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A tracker cannot be had or started, or one failed in a run that is to stop for that.
    #[error(transparent)]
    Tracker(#[from] crate::trackers::TrackerError),
    /// A DeepSpeed configuration cannot be used.
    #[error(transparent)]
    DeepSpeed(#[from] crate::deepspeed::ConfigError),
    /// What is asked of fully sharded data parallelism cannot be.
    #[error(transparent)]
    FullySharded(#[from] sconce_fsdp::Error),
    /// Managed state failed.
    #[error(transparent)]
    Zero(#[from] sconce_zero::Error),
    /// Ranks could not exchange data.
    #[error(transparent)]
    Collectives(#[from] sconce_collectives::Error),
    /// candle refused a tensor operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}
