//! The flags of fp8, in Accelerate's spelling.

use clap::Args;
use sconce_core::environment as variable;

/// How scales of fp8 come to be.
#[derive(Debug, Args)]
#[command(next_help_heading = "fp8 (with --mixed_precision fp8)")]
pub(crate) struct Fp8Arguments {
    /// Formats: HYBRID, E4M3 for values and E5M2 for gradients, or E4M3 for both [default: HYBRID]
    #[arg(long = "fp8_format", alias = "fp8-format", value_name = "FORMAT")]
    format: Option<String>,

    /// Room of the scales above what was seen, as a power of two [default: 0]
    #[arg(
        long = "fp8_margin",
        alias = "fp8-margin",
        value_name = "POWER",
        allow_hyphen_values = true
    )]
    margin: Option<i32>,

    /// Backwards between two changes of the scales [default: 1]
    #[arg(long = "fp8_interval", alias = "fp8-interval", value_name = "N")]
    interval: Option<u64>,

    /// How many greatest magnitudes the scales remember [default: 1024]
    #[arg(long = "fp8_amax_history_len", alias = "fp8-amax-history-len", value_name = "N")]
    amax_history_len: Option<u64>,

    /// Which of them scales: max or most_recent [default: max]
    #[arg(long = "fp8_amax_compute_algo", alias = "fp8-amax-compute-algo", value_name = "RULE")]
    amax_compute_algo: Option<String>,
}

impl Fp8Arguments {
    /// Returns the variables that tell the ranks of these flags.
    pub(super) fn variables(&self) -> impl Iterator<Item = (&'static str, String)> {
        let flags = [
            (variable::ACCELERATE_FP8_FORMAT, self.format.clone()),
            (
                variable::ACCELERATE_FP8_MARGIN,
                self.margin.map(|margin| margin.to_string()),
            ),
            (
                variable::ACCELERATE_FP8_INTERVAL,
                self.interval.map(|count| count.to_string()),
            ),
            (
                variable::ACCELERATE_FP8_AMAX_HISTORY_LEN,
                self.amax_history_len.map(|count| count.to_string()),
            ),
            (
                variable::ACCELERATE_FP8_AMAX_COMPUTE_ALGO,
                self.amax_compute_algo.clone(),
            ),
        ];
        flags.into_iter().filter_map(|(name, value)| Some((name, value?)))
    }
}
