//! What concerns GPUs: checks of the features `cuda` and `nccl` on machines without CUDA, and a folder for one with it.

pub(crate) mod check;
pub(crate) mod gpu;
pub(crate) mod nvcc;
mod toolkit;
