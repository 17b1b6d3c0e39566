//! How gradients are made smaller on their way between ranks.

use candle_core::DType;
use sconce_zero::PowerSgd;

/// A compression of gradients, as PyTorch's communication hooks; what a rank keeps is f32 in any case.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum GradientCompression {
    /// Rounded to f16, and summed in it: every sum is rounded once.
    Fp16,
    /// Rounded to bf16.
    Bf16,
    /// As products of thin matrices; for data parallelism.
    PowerSgd(PowerSgd),
}

impl GradientCompression {
    /// Returns the type in which gradients travel.
    pub(crate) fn dtype(&self) -> Option<DType> {
        match self {
            Self::Fp16 => Some(DType::F16),
            Self::Bf16 => Some(DType::BF16),
            Self::PowerSgd(_) => None,
        }
    }

    pub(crate) fn power_sgd(&self) -> Option<&PowerSgd> {
        match self {
            Self::PowerSgd(settings) => Some(settings),
            Self::Fp16 | Self::Bf16 => None,
        }
    }
}
