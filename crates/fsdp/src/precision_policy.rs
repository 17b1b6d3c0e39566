//! In which types a sharded model computes and reduces.

use crate::{Error, Result};
use candle_core::DType;

/// FSDP2's `MixedPrecisionPolicy`. Shards, optimizer state and the sums of gradients are f32 in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrecisionPolicy {
    /// What the model computes in: f32, bf16 or f16; `None` leaves it to the run's mixed precision.
    pub param_dtype: Option<DType>,
    /// What gradients are summed in: f32, whatever stands here. `None` is `param_dtype` in PyTorch.
    pub reduce_dtype: Option<DType>,
    /// What outputs are cast to. candle has no place where a model's outputs pass: the program casts them.
    pub output_dtype: Option<DType>,
    /// Whether inputs are cast to `param_dtype`. The program casts them, for the same reason.
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

    pub(crate) fn notices(&self) -> impl Iterator<Item = String> {
        let reduced = self
            .reduce_dtype
            .filter(|dtype| *dtype != DType::F32)
            .map(|dtype| format!("reduce_dtype={}: gradients are summed in f32", dtype.as_str()));
        let output = self
            .output_dtype
            .map(|dtype| format!("output_dtype={}: outputs are cast by the program only", dtype.as_str()));
        reduced.into_iter().chain(output)
    }
}
