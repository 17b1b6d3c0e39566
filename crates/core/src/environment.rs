//! Every environment variable that this crate reads. Who is in the world is read by
//! [`sconce_collectives::environment`].

/// Gradient accumulation steps, a whole number above 0. Set by `sconce launch --gradient_accumulation_steps`.
pub const ACCELERATE_GRADIENT_ACCUMULATION_STEPS: &str = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS";
/// Mixed precision: `no`; other values are refused in this version. Set by `sconce launch --mixed_precision`.
pub const ACCELERATE_MIXED_PRECISION: &str = "ACCELERATE_MIXED_PRECISION";
/// Whether training state is sharded as DeepSpeed's ZeRO does: `true` or `false`. Set by `sconce launch --use_deepspeed`.
pub const ACCELERATE_USE_DEEPSPEED: &str = "ACCELERATE_USE_DEEPSPEED";
/// ZeRO stage, 0 to 2; 2 where it is not set. Set by `sconce launch --zero_stage`.
pub const ACCELERATE_DEEPSPEED_ZERO_STAGE: &str = "ACCELERATE_DEEPSPEED_ZERO_STAGE";
/// Folder for the flight recorder's files, written when a collective fails; the system's temporary folder by default.
pub const SCONCE_FLIGHT_RECORDER: &str = "SCONCE_FLIGHT_RECORDER";
/// How long a collective waits for its peers, in seconds; 1800 by default.
pub const SCONCE_TIMEOUT: &str = "SCONCE_TIMEOUT";
