//! How scales follow from what was seen: the settings of delayed scaling.

use crate::{Error, ParameterSet, Result};

/// Settings of training in fp8, with the names and defaults of Transformer Engine's `DelayedScaling`.
#[derive(Debug, Clone)]
pub struct Fp8Recipe {
    /// Which formats are used for what.
    pub format: Fp8Format,
    /// Room above the amax, as a power of two: scales are divided by `2^margin`.
    pub margin: i32,
    /// Backwards between two changes of the scales.
    pub interval: u64,
    /// How many amaxes are remembered.
    pub amax_history_len: usize,
    /// How the amax that scales is chosen from those.
    pub amax_compute: AmaxCompute,
    /// Whether ranks agree on amaxes of inputs and gradients, by one small reduction after each backward.
    pub reduce_amax: bool,
    /// The weights whose layers compute in fp8; all by default.
    pub layers: ParameterSet,
}

/// The formats of a recipe.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Fp8Format {
    /// E4M3 for inputs and weights, E5M2, of a wider range, for gradients: `HYBRID`.
    #[default]
    Hybrid,
    /// E4M3 for everything.
    E4m3,
}

/// How the amax that scales is chosen from the history.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AmaxCompute {
    /// The greatest of the history: `max`.
    #[default]
    Max,
    /// The last one: `most_recent`.
    MostRecent,
}

impl Default for Fp8Recipe {
    fn default() -> Self {
        Self {
            format: Fp8Format::default(),
            margin: 0,
            interval: 1,
            amax_history_len: 1024,
            amax_compute: AmaxCompute::default(),
            reduce_amax: true,
            layers: ParameterSet::all(),
        }
    }
}

impl Fp8Recipe {
    /// Refuses settings that mean nothing.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |setting, value: String, expected: &str| {
            Err(Error::Setting {
                setting,
                value,
                expected: expected.into(),
            })
        };
        if self.interval == 0 {
            return refuse("fp8 interval", "0".into(), "expected a whole number above 0");
        }
        if self.amax_history_len == 0 {
            return refuse("fp8 amax_history_len", "0".into(), "expected a whole number above 0");
        }
        if !(-64..=64).contains(&self.margin) {
            return refuse(
                "fp8 margin",
                self.margin.to_string(),
                "expected a power of two from -64 to 64",
            );
        }
        Ok(())
    }

    /// Returns the amax of a history that begins with the last one; 0 where it is empty.
    pub(super) fn amax<'a>(&self, mut history: impl Iterator<Item = &'a f32>) -> f32 {
        match self.amax_compute {
            AmaxCompute::Max => history.fold(0.0, |most, amax| most.max(*amax)),
            AmaxCompute::MostRecent => history.next().copied().unwrap_or(0.0),
        }
    }
}
