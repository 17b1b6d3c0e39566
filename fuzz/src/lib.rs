//! What the fuzz targets do with their input. Each function takes any bytes; it returns, or panics where a rule is broken.
//!
//! `crates/cli/tests/fuzz_targets` compiles these files too and runs them over their seeds, so that they stay true of the
//! code without nightly and libFuzzer.

pub mod configuration;
pub mod deepspeed_json;
pub mod environment;
pub mod store_connection;
pub mod store_frames;
