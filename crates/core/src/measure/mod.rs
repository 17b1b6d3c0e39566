//! Short measurements of what a run spends its time on, as `cargo xtask bench` and `sconce bench` take them: steps by
//! strategy ([`StepTimes`]), checkpoints beside the disk itself ([`CheckpointTimes`]). Collectives are in
//! [`sconce_collectives::measure`].
//!
//! What is compared takes turns within a round, so that a busy machine is busy for all; figures are medians over rounds.

mod checkpoint;
mod step;

pub use checkpoint::{CheckpointPart, CheckpointTimes};
pub use step::{StepTimes, StrategyTimes};

/// What a measurement fails of.
pub type MeasureError = Box<dyn std::error::Error + Send + Sync>;
