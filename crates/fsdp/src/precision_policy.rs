//! In which types a sharded model computes and reduces.

use crate::{Error, Result};
use candle_core::DType;

/// FSDP2's `MixedPrecisionPolicy`. Shards, optimizer state and the sums of gradients are f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrecisionPolicy {
    /// What the model computes in: f32, bf16 or f16; `None` leaves it to the run's mixed precision.
    pub param_dtype: Option<DType>,
    /// What gradients travel and are summed in; `None` is f32, where PyTorch has `param_dtype`.
    pub reduce_dtype: Option<DType>,
    /// What the outputs of units are cast to; `None` leaves them as they are. Outside of units the program casts.
    pub output_dtype: Option<DType>,
    /// Whether inputs of units are cast to the dtype of their parameters.
    pub cast_forward_inputs: bool,
}

impl Default for PrecisionPolicy {
    fn default() -> Self {
        Self {
            param_dtype: None,
            reduce_dtype: None,
            output_dtype: None,
            cast_forward_inputs: true,
        }
    }
}

impl PrecisionPolicy {
    pub(crate) fn check(&self) -> Result<()> {
        for (setting, dtype) in [
            ("param_dtype", self.param_dtype),
            ("reduce_dtype", self.reduce_dtype),
            ("output_dtype", self.output_dtype),
        ] {
            if let Some(dtype) = dtype.filter(|dtype| !matches!(dtype, DType::F32 | DType::BF16 | DType::F16)) {
                return Err(Error::Setting {
                    setting,
                    value: dtype.as_str().to_owned(),
                    expected: "expected f32, bf16 or f16".to_owned(),
                });
            }
        }
        Ok(())
    }
}
