//! How many bytes of training state a rank holds.

/// Bytes held on this rank, by what they are for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryReport {
    /// Values that the model computes with: of a sharded parameter this rank's share.
    pub parameters: u64,
    /// f32 values behind bf16 and f16 parameters, and the variables of a candle optimizer.
    pub masters: u64,
    /// Gradients that last from one backward to the step.
    pub gradients: u64,
    /// What the optimizer keeps in memory, buffers for state on disk included; 0 before the first step, and for a candle
    /// optimizer, which does not tell.
    pub optimizer_state: u64,
    /// What the optimizer keeps on disk, and sharded parameters there.
    pub on_disk: u64,
    /// Buffers through which sharded gradients and updated values pass, and on a GPU all that is copied from and to it.
    pub buffers: u64,
    /// Sharded parameters that are gathered now.
    pub gathered: u64,
    /// Memory of parameters that were gathered, kept for those that are gathered next: at most what units need at once and
    /// the largest unit more, less what is gathered.
    pub spare: u64,
    /// The most that was gathered at once.
    pub gathered_peak: u64,
}

impl MemoryReport {
    /// Returns all bytes held in memory now.
    pub fn total(&self) -> u64 {
        self.parameters
            + self.masters
            + self.gradients
            + self.optimizer_state
            + self.buffers
            + self.gathered
            + self.spare
    }
}
