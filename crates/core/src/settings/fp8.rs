//! The recipe of fp8, as the environment has it.

use super::variables::Environment;
use crate::Result;
use crate::environment as variable;
use crate::fp8::{AmaxCompute, Fp8Format, Fp8Recipe};

/// Reads Accelerate's variables; what they do not say has Transformer Engine's default.
pub(super) fn read(environment: &Environment<'_>) -> Result<Fp8Recipe> {
    let default = Fp8Recipe::default();
    let format = environment.value(
        variable::ACCELERATE_FP8_FORMAT,
        "expected HYBRID or E4M3; E5M2 has too few digits for values",
        |text| match text.to_ascii_uppercase().as_str() {
            "HYBRID" => Some(Fp8Format::Hybrid),
            "E4M3" => Some(Fp8Format::E4m3),
            _ => None,
        },
    )?;
    let amax_compute = environment.value(
        variable::ACCELERATE_FP8_AMAX_COMPUTE_ALGO,
        "expected max or most_recent",
        |text| match text.to_ascii_lowercase().as_str() {
            "max" => Some(AmaxCompute::Max),
            "most_recent" => Some(AmaxCompute::MostRecent),
            _ => None,
        },
    )?;
    let history = environment.above_zero(variable::ACCELERATE_FP8_AMAX_HISTORY_LEN)?;
    let margin = environment.value(
        variable::ACCELERATE_FP8_MARGIN,
        "expected a power of two from -64 to 64",
        |text| text.parse().ok().filter(|margin| (-64..=64).contains(margin)),
    )?;
    Ok(Fp8Recipe {
        format: format.unwrap_or(default.format),
        margin: margin.unwrap_or(default.margin),
        interval: environment
            .above_zero(variable::ACCELERATE_FP8_INTERVAL)?
            .unwrap_or(default.interval),
        amax_history_len: history.map_or(default.amax_history_len, super::resolve::count),
        amax_compute: amax_compute.unwrap_or(default.amax_compute),
        ..default
    })
}
