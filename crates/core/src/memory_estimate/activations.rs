//! What a forward keeps for its backward, and what the backward needs beside it.

/// Activations of parts that are alike.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PartActivations {
    /// How many of them there are.
    pub count: usize,
    /// Bytes of a part's input, which it keeps where it computes again.
    pub input: u64,
    /// Bytes of its output, of which a unit with sharded parameters hands a copy on.
    pub output: u64,
    /// Bytes that it keeps from forward to backward, where it does not compute again; its output is among them.
    pub kept: u64,
    /// The most bytes that its backward needs at once beside what is kept: gradients under way.
    pub backward: u64,
}

/// Activations of one micro-batch on one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Activations {
    /// The parts of the model, in the order of the forward.
    pub parts: Vec<PartActivations>,
    /// Bytes that are kept outside of all parts: the last norm's, the loss's.
    pub outside: u64,
    /// The most that the backward of these needs beside what is kept.
    pub outside_backward: u64,
    /// Bytes that stay for the whole run, such as tables of positions.
    pub constants: u64,
}

impl Activations {
    /// Returns the bytes that are there when the forward has ended; with `recompute` parts keep their inputs only, with
    /// `gated` every part's output is there twice.
    pub fn kept(&self, recompute: bool, gated: bool) -> u64 {
        let of_part = |part: &PartActivations| {
            let kept = match (recompute, gated) {
                // Its output is the next part's input, but for the last.
                (true, _) => part.output,
                (false, true) => part.kept + part.output,
                (false, false) => part.kept,
            };
            part.count as u64 * kept
        };
        self.outside + self.parts.iter().map(of_part).sum::<u64>()
    }

    /// Returns the most bytes that the backward needs beside them.
    pub fn backward(&self, recompute: bool) -> u64 {
        let of_part = |part: &PartActivations| match recompute {
            // Its graph once more, and the gradient of its output, which begins the part's own backward.
            true => part.input + part.kept + part.output + part.backward.max(3 * part.output),
            false => part.backward,
        };
        let parts = self.parts.iter().map(of_part);
        parts.chain([self.outside_backward]).max().unwrap_or(0)
    }
}
