//! Batch per step = micro-batch per rank x accumulation steps x data-parallel ranks.

use super::ConfigError;

/// The three batch sizes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchSizes {
    /// Samples of one optimizer step, over all ranks: `train_batch_size`.
    pub train: u64,
    /// Samples of one forward on one rank: `train_micro_batch_size_per_gpu`.
    pub micro_per_rank: u64,
    /// Forwards of one optimizer step: `gradient_accumulation_steps`.
    pub accumulation_steps: u64,
}

/// What a file says of them; what is absent follows from the others.
#[derive(Debug, Clone, Copy)]
pub(super) struct GivenSizes {
    pub(super) train: Option<u64>,
    pub(super) micro_per_rank: Option<u64>,
    pub(super) accumulation_steps: Option<u64>,
}

impl GivenSizes {
    /// Finds what is absent, and checks, as DeepSpeed does (`runtime/config.py`).
    pub(super) fn solve(self, ranks: u64, file: &str) -> Result<BatchSizes, ConfigError> {
        let error = |message: String| ConfigError::BatchSizes {
            file: file.into(),
            message,
        };
        if ranks == 0 {
            return Err(error("no data-parallel ranks; expected at least 1".into()));
        }
        for (key, value) in [
            ("train_batch_size", self.train),
            ("train_micro_batch_size_per_gpu", self.micro_per_rank),
            ("gradient_accumulation_steps", self.accumulation_steps),
        ] {
            if value == Some(0) {
                return Err(error(format!("`{key}` is 0; expected a whole number above 0")));
            }
        }
        let product = |micro: u64, steps: u64| {
            let product = micro.checked_mul(steps).and_then(|product| product.checked_mul(ranks));
            product.ok_or_else(|| {
                error(format!(
                    "`train_micro_batch_size_per_gpu` {micro} x `gradient_accumulation_steps` {steps} x {ranks} ranks is \
                     beyond 2^64; give smaller numbers"
                ))
            })
        };
        let (train, micro, steps) = match (self.train, self.micro_per_rank, self.accumulation_steps) {
            (Some(train), Some(micro), Some(steps)) => (train, micro, steps),
            (Some(train), Some(micro), None) => (train, micro, train / micro / ranks),
            (Some(train), None, Some(steps)) => (train, train / ranks / steps, steps),
            (Some(train), None, None) => (train, train / ranks, 1),
            (None, Some(micro), steps) => {
                let steps = steps.unwrap_or(1);
                (product(micro, steps)?, micro, steps)
            }
            (None, None, _) => {
                return Err(error(
                    "neither `train_batch_size` nor `train_micro_batch_size_per_gpu` is given; give one of them".into(),
                ));
            }
        };
        if micro == 0 || steps == 0 || train != product(micro, steps)? {
            return Err(error(self.misfit(train, ranks)));
        }
        Ok(BatchSizes {
            train,
            micro_per_rank: micro,
            accumulation_steps: steps,
        })
    }

    fn misfit(self, train: u64, ranks: u64) -> String {
        let show = |value: Option<u64>| value.map_or_else(|| "(not given)".into(), |value| value.to_string());
        let micro = self.micro_per_rank.unwrap_or(1);
        let unit = u128::from(micro) * u128::from(self.accumulation_steps.unwrap_or(1)) * u128::from(ranks);
        let nearest = (u128::from(train) / unit).max(1) * unit;
        format!(
            "`train_batch_size` {train} is not `train_micro_batch_size_per_gpu` {} x `gradient_accumulation_steps` {} x \
             {ranks} ranks; set `train_batch_size` to {}, or leave one of the three out",
            show(self.micro_per_rank),
            show(self.accumulation_steps),
            if self.micro_per_rank.is_some() && self.accumulation_steps.is_some() {
                unit.to_string()
            } else {
                format!("a multiple of {unit}, such as {nearest}")
            },
        )
    }
}
