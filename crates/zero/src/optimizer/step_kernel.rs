//! How a rule's update runs on a GPU.

/// One of this crate's kernels for GPUs, which does to every element what [`update`](crate::OptimizerRule::update) does, to
/// the same bits; with the factors of one step.
///
/// The rules of this crate have one. A rule of yours that is one of them but for its settings may pass on that rule's.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "read where there are kernels"))]
pub struct StepKernel {
    pub(crate) name: &'static str,
    /// How many state arrays it works with.
    pub(crate) arrays: usize,
    /// In the order of the kernel's own structure.
    pub(crate) factors: [f32; Self::FACTORS],
}

impl StepKernel {
    /// Most factors of a kernel.
    pub(crate) const FACTORS: usize = 10;

    pub(super) fn new<const COUNT: usize>(name: &'static str, arrays: usize, factors: [f32; COUNT]) -> Self {
        const { assert!(COUNT <= Self::FACTORS) };
        let mut all = [0.0; Self::FACTORS];
        all[..COUNT].copy_from_slice(&factors);
        Self {
            name,
            arrays,
            factors: all,
        }
    }
}
