//! Every environment variable that this crate reads. Who is in the world is read by
//! [`sconce_collectives::environment`].

/// Gradient accumulation steps, a whole number above 0. Set by `sconce launch --gradient_accumulation_steps`.
pub const ACCELERATE_GRADIENT_ACCUMULATION_STEPS: &str = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS";
/// What the model computes in: `no` (f32), `bf16` or `fp16`. Set by `sconce launch --mixed_precision`.
pub const ACCELERATE_MIXED_PRECISION: &str = "ACCELERATE_MIXED_PRECISION";
/// Whether training state is sharded as DeepSpeed's ZeRO does: `true` or `false`. The variables below count only where
/// it is true. Set by `sconce launch --use_deepspeed`.
pub const ACCELERATE_USE_DEEPSPEED: &str = "ACCELERATE_USE_DEEPSPEED";
/// File with a DeepSpeed configuration. Set by `sconce launch --deepspeed_config_file`.
pub const ACCELERATE_DEEPSPEED_CONFIG_FILE: &str = "ACCELERATE_DEEPSPEED_CONFIG_FILE";
/// ZeRO stage, 0 to 3; without it and without a configuration file, 2. Set by `sconce launch --zero_stage`.
pub const ACCELERATE_DEEPSPEED_ZERO_STAGE: &str = "ACCELERATE_DEEPSPEED_ZERO_STAGE";
/// Where optimizer state lies: `none`, `cpu` (stage 1 to 3) or `nvme` (stage 3). Set by
/// `sconce launch --offload_optimizer_device`.
pub const ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE: &str = "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE";
/// Where sharded parameters lie: `none`, `cpu` or `nvme`, in stage 3. Set by `sconce launch --offload_param_device`.
pub const ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE: &str = "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE";
/// Existing folder for optimizer state, where its device is `nvme`. Set by `sconce launch --offload_optimizer_nvme_path`.
pub const ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH: &str = "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH";
/// Existing folder for parameters, where their device is `nvme`; the same as for optimizer state. Set by
/// `sconce launch --offload_param_nvme_path`.
pub const ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH: &str = "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH";
/// Whether parameters are sharded from their creation, `true` or `false`: here they always are in stage 3, and never
/// before. Set by `sconce launch --zero3_init_flag`.
pub const ACCELERATE_DEEPSPEED_ZERO3_INIT: &str = "ACCELERATE_DEEPSPEED_ZERO3_INIT";
/// Whether whole weights are gathered when a model of stage 3 is saved, `true` or `false`. Set by
/// `sconce launch --zero3_save_16bit_model`.
pub const ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL: &str = "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL";
/// Global norm to which a step clips gradients that the program has not clipped; 0 turns clipping off, `none` says nothing.
/// Set by `sconce launch --gradient_clipping`.
pub const ACCELERATE_GRADIENT_CLIPPING: &str = "ACCELERATE_GRADIENT_CLIPPING";
/// Folder for the flight recorder's files, written when a collective fails; the system's temporary folder by default.
pub const SCONCE_FLIGHT_RECORDER: &str = "SCONCE_FLIGHT_RECORDER";
/// How long a collective waits for its peers, in seconds; 1800 by default.
pub const SCONCE_TIMEOUT: &str = "SCONCE_TIMEOUT";
