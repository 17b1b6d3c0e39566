//! `reshard_after_forward`, which means two things: in FSDP2 a yes or no, in FSDP1 the name of a strategy.

use crate::{FsdpStrategy, Named};
use std::fmt;

/// Whether parameters are released after the forward, as one of the two versions says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReshardAfterForward {
    /// FSDP2: `true` is [`FsdpStrategy::FullShard`], `false` [`FsdpStrategy::ShardGradOp`].
    Bool(bool),
    /// FSDP1, where Accelerate stores the strategy under this name.
    Strategy(FsdpStrategy),
}

impl ReshardAfterForward {
    /// Reads `true`, `false` or a strategy's name.
    pub fn from_name(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "true" => Some(Self::Bool(true)),
            "false" => Some(Self::Bool(false)),
            name => FsdpStrategy::from_name(name).map(Self::Strategy),
        }
    }

    /// Says what can be read, for messages.
    pub fn expected() -> String {
        let names = FsdpStrategy::expected();
        format!("expected true or false (version 2) or a strategy (version 1): {names}")
    }
}

impl fmt::Display for ReshardAfterForward {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => value.fmt(formatter),
            Self::Strategy(strategy) => formatter.write_str(strategy.name()),
        }
    }
}
