//! What concerns GPUs: checks of the features `cuda` and `nccl` on machines without CUDA.

pub(crate) mod check;
pub(crate) mod nvcc;
mod toolkit;
