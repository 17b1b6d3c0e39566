//! How many bytes of training state a rank holds.

/// Bytes held on this rank, by what they are for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Values that the model computes with.
    pub parameters: u64,
    /// Gradients that last from one backward to the step.
    pub gradients: u64,
    /// What the optimizer keeps; 0 before the first step.
    pub optimizer_state: u64,
    /// Buffers through which sharded gradients and updated values pass.
    pub buffers: u64,
}

impl MemoryReport {
    /// Returns all bytes together.
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer_state + self.buffers
    }
}
