//! Every environment variable that this crate reads. Who is in the world is read by
//! [`sconce_collectives::environment`].

/// Gradient accumulation steps, a whole number above 0. Set by `sconce launch --gradient_accumulation_steps`.
pub const ACCELERATE_GRADIENT_ACCUMULATION_STEPS: &str = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS";
/// What the model computes in: `no` (f32), `bf16`, `fp16` or `fp8`. Set by `sconce launch --mixed_precision`.
pub const ACCELERATE_MIXED_PRECISION: &str = "ACCELERATE_MIXED_PRECISION";
/// Formats of fp8, where the precision is that: `HYBRID` (the default) or `E4M3`.
pub const ACCELERATE_FP8_FORMAT: &str = "ACCELERATE_FP8_FORMAT";
/// Room of fp8's scales above what was seen, as a power of two; 0 by default.
pub const ACCELERATE_FP8_MARGIN: &str = "ACCELERATE_FP8_MARGIN";
/// Backwards between two changes of fp8's scales; 1 by default.
pub const ACCELERATE_FP8_INTERVAL: &str = "ACCELERATE_FP8_INTERVAL";
/// How many greatest magnitudes fp8's scales remember; 1024 by default.
pub const ACCELERATE_FP8_AMAX_HISTORY_LEN: &str = "ACCELERATE_FP8_AMAX_HISTORY_LEN";
/// Which of them scales: `max` (the default) or `most_recent`.
pub const ACCELERATE_FP8_AMAX_COMPUTE_ALGO: &str = "ACCELERATE_FP8_AMAX_COMPUTE_ALGO";
/// Whether shapes are compared over all ranks before every collective on tensors: `true` or `false`. Set by
/// `sconce launch --debug`.
pub const ACCELERATE_DEBUG_MODE: &str = "ACCELERATE_DEBUG_MODE";
/// Whether each rank is bound to its share of its host's cores: `true` or `false`. Read and set by `sconce launch`
/// (`--enable_cpu_affinity`), which binds the ranks.
pub const ACCELERATE_CPU_AFFINITY: &str = "ACCELERATE_CPU_AFFINITY";
/// Whether ranks compute on the CPU even where there is a GPU: `true` or `false`. Set by `sconce launch --cpu`.
pub const ACCELERATE_USE_CPU: &str = "ACCELERATE_USE_CPU";
/// Whether training state is sharded as DeepSpeed's ZeRO does: `true` or `false`. The variables below count only where
/// it is true. Set by `sconce launch --use_deepspeed`.
pub const ACCELERATE_USE_DEEPSPEED: &str = "ACCELERATE_USE_DEEPSPEED";
/// File with a DeepSpeed configuration, or the configuration itself: JSON in base64, as Accelerate reads it too. Set by
/// `sconce launch --deepspeed_config_file`.
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
/// Whether training state is sharded as FSDP does: `true` or `false`. The variables that begin with `FSDP_` count only
/// where it is true. Set by `sconce launch --use_fsdp`.
pub const ACCELERATE_USE_FSDP: &str = "ACCELERATE_USE_FSDP";
/// Version of FSDP, 1 or 2; 1 by default. Set by `sconce launch --fsdp_version`.
pub const FSDP_VERSION: &str = "FSDP_VERSION";
/// Version 1: `FULL_SHARD`, `SHARD_GRAD_OP`, `NO_SHARD`, `HYBRID_SHARD` or `HYBRID_SHARD_ZERO2`, or their number from 1.
/// Set by `sconce launch --fsdp_sharding_strategy`.
pub const FSDP_SHARDING_STRATEGY: &str = "FSDP_SHARDING_STRATEGY";
/// Version 2: `true` or `false`; version 1: the strategy by another name. Set by
/// `sconce launch --fsdp_reshard_after_forward`.
pub const FSDP_RESHARD_AFTER_FORWARD: &str = "FSDP_RESHARD_AFTER_FORWARD";
/// What becomes a unit: `TRANSFORMER_BASED_WRAP`, `SIZE_BASED_WRAP` or `NO_WRAP`. Set by
/// `sconce launch --fsdp_auto_wrap_policy`.
pub const FSDP_AUTO_WRAP_POLICY: &str = "FSDP_AUTO_WRAP_POLICY";
/// Classes of `TRANSFORMER_BASED_WRAP`, with commas between. Set by
/// `sconce launch --fsdp_transformer_layer_cls_to_wrap`.
pub const FSDP_TRANSFORMER_CLS_TO_WRAP: &str = "FSDP_TRANSFORMER_CLS_TO_WRAP";
/// Elements from which `SIZE_BASED_WRAP` makes a unit; 100000000 by default. Set by `sconce launch --fsdp_min_num_params`.
pub const FSDP_MIN_NUM_PARAMS: &str = "FSDP_MIN_NUM_PARAMS";
/// Modules that are not sharded: a regular expression on their whole names.
pub const FSDP_IGNORED_MODULES: &str = "FSDP_IGNORED_MODULES";
/// When the next unit of the backward is gathered: `BACKWARD_PRE`, `BACKWARD_POST` or `NO_PREFETCH`. Set by
/// `sconce launch --fsdp_backward_prefetch`.
pub const FSDP_BACKWARD_PREFETCH: &str = "FSDP_BACKWARD_PREFETCH";
/// Whether the next unit of the forward is gathered ahead. Set by `sconce launch --fsdp_forward_prefetch`.
pub const FSDP_FORWARD_PREFETCH: &str = "FSDP_FORWARD_PREFETCH";
/// Whether shares and optimizer state lie on the host. Set by `sconce launch --fsdp_offload_params`.
pub const FSDP_OFFLOAD_PARAMS: &str = "FSDP_OFFLOAD_PARAMS";
/// Whether units compute again in the backward. Set by `sconce launch --fsdp_activation_checkpointing`.
pub const FSDP_ACTIVATION_CHECKPOINTING: &str = "FSDP_ACTIVATION_CHECKPOINTING";
/// Whether what units keep for the backward goes to the host: not supported, `false`. Set by
/// `sconce launch --fsdp_activation_checkpointing_offload`.
pub const FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD: &str = "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD";
/// `FULL_STATE_DICT`, `LOCAL_STATE_DICT` or `SHARDED_STATE_DICT`. Set by `sconce launch --fsdp_state_dict_type`.
pub const FSDP_STATE_DICT_TYPE: &str = "FSDP_STATE_DICT_TYPE";
/// Whether parameters keep names and shapes, as they always do here. Set by `sconce launch --fsdp_use_orig_params`.
pub const FSDP_USE_ORIG_PARAMS: &str = "FSDP_USE_ORIG_PARAMS";
/// Whether all ranks begin with rank 0's values, as they always do here. Set by
/// `sconce launch --fsdp_sync_module_states`.
pub const FSDP_SYNC_MODULE_STATES: &str = "FSDP_SYNC_MODULE_STATES";
/// Whether one rank reads weights for all; here each reads its share. Set by
/// `sconce launch --fsdp_cpu_ram_efficient_loading`.
pub const FSDP_CPU_RAM_EFFICIENT_LOADING: &str = "FSDP_CPU_RAM_EFFICIENT_LOADING";
/// Whether a mesh is given, `true` or `false`; needs FSDP's version 2. The variables below count only where it is true. Set
/// by `sconce launch --use_parallelism_config`.
pub const ACCELERATE_USE_PARALLELISM_CONFIG: &str = "ACCELERATE_USE_PARALLELISM_CONFIG";
/// Groups of ranks that each hold all state; 1 by default.
pub const PARALLELISM_CONFIG_DP_REPLICATE_SIZE: &str = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE";
/// Ranks of such a group, which share its state; 1 by default. The product of both is the number of ranks.
pub const PARALLELISM_CONFIG_DP_SHARD_SIZE: &str = "PARALLELISM_CONFIG_DP_SHARD_SIZE";
/// Ranks that share products of matrices: not supported, 1.
pub const PARALLELISM_CONFIG_TP_SIZE: &str = "PARALLELISM_CONFIG_TP_SIZE";
/// Ranks that share sequences: not supported, 1.
pub const PARALLELISM_CONFIG_CP_SIZE: &str = "PARALLELISM_CONFIG_CP_SIZE";
/// Ranks that share sequences, in another way: not supported, 1.
pub const PARALLELISM_CONFIG_SP_SIZE: &str = "PARALLELISM_CONFIG_SP_SIZE";
/// Server that the tracker `mlflow` sends to, as MLflow's own programs read it: `http://HOST:PORT` or `https://..`; files
/// for anything else.
pub const MLFLOW_TRACKING_URI: &str = "MLFLOW_TRACKING_URI";
/// Token that this server asks for. A secret.
pub const MLFLOW_TRACKING_TOKEN: &str = "MLFLOW_TRACKING_TOKEN";
/// What a rank computes on: `cpu`, `cuda` (the GPU whose number is the rank's on its host) or `cuda:N`; by default a GPU
/// for each rank over NCCL, else the CPU.
pub const SCONCE_DEVICE: &str = "SCONCE_DEVICE";
/// Folder for the flight recorder's files, written when a collective fails; the system's temporary folder by default.
pub const SCONCE_FLIGHT_RECORDER: &str = "SCONCE_FLIGHT_RECORDER";
/// How long a collective waits for its peers, in seconds; 1800 by default.
pub const SCONCE_TIMEOUT: &str = "SCONCE_TIMEOUT";
/// File in which a rank that fails leaves its error for the launcher. Set by torchrun and `sconce launch`.
pub const TORCHELASTIC_ERROR_FILE: &str = "TORCHELASTIC_ERROR_FILE";

/// All of them, in the order of this page.
pub const ALL: &[&str] = &[
    ACCELERATE_GRADIENT_ACCUMULATION_STEPS,
    ACCELERATE_MIXED_PRECISION,
    ACCELERATE_FP8_FORMAT,
    ACCELERATE_FP8_MARGIN,
    ACCELERATE_FP8_INTERVAL,
    ACCELERATE_FP8_AMAX_HISTORY_LEN,
    ACCELERATE_FP8_AMAX_COMPUTE_ALGO,
    ACCELERATE_DEBUG_MODE,
    ACCELERATE_CPU_AFFINITY,
    ACCELERATE_USE_CPU,
    ACCELERATE_USE_DEEPSPEED,
    ACCELERATE_DEEPSPEED_CONFIG_FILE,
    ACCELERATE_DEEPSPEED_ZERO_STAGE,
    ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE,
    ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE,
    ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH,
    ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH,
    ACCELERATE_DEEPSPEED_ZERO3_INIT,
    ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL,
    ACCELERATE_GRADIENT_CLIPPING,
    ACCELERATE_USE_FSDP,
    FSDP_VERSION,
    FSDP_SHARDING_STRATEGY,
    FSDP_RESHARD_AFTER_FORWARD,
    FSDP_AUTO_WRAP_POLICY,
    FSDP_TRANSFORMER_CLS_TO_WRAP,
    FSDP_MIN_NUM_PARAMS,
    FSDP_IGNORED_MODULES,
    FSDP_BACKWARD_PREFETCH,
    FSDP_FORWARD_PREFETCH,
    FSDP_OFFLOAD_PARAMS,
    FSDP_ACTIVATION_CHECKPOINTING,
    FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD,
    FSDP_STATE_DICT_TYPE,
    FSDP_USE_ORIG_PARAMS,
    FSDP_SYNC_MODULE_STATES,
    FSDP_CPU_RAM_EFFICIENT_LOADING,
    ACCELERATE_USE_PARALLELISM_CONFIG,
    PARALLELISM_CONFIG_DP_REPLICATE_SIZE,
    PARALLELISM_CONFIG_DP_SHARD_SIZE,
    PARALLELISM_CONFIG_TP_SIZE,
    PARALLELISM_CONFIG_CP_SIZE,
    PARALLELISM_CONFIG_SP_SIZE,
    MLFLOW_TRACKING_URI,
    MLFLOW_TRACKING_TOKEN,
    SCONCE_DEVICE,
    SCONCE_FLIGHT_RECORDER,
    SCONCE_TIMEOUT,
    TORCHELASTIC_ERROR_FILE,
];

/// What `sconce launch` tells glibc's allocator where nobody else does, in bytes: blocks up to the first come from its heap, and so
/// much may be free at the heap's end before the system gets it back.
///
/// Else a step's activations come anew, page by page, at every step; with these a step of a small Llama took 8 % less time, at
/// the same peak of memory. This crate does not read them.
pub const KEPT_MEMORY: [(&str, &str); 2] = [
    ("MALLOC_MMAP_THRESHOLD_", "67108864"),
    ("MALLOC_TRIM_THRESHOLD_", "536870912"),
];

#[cfg(test)]
mod tests {
    #[test]
    fn all_has_every_variable_of_this_page() {
        let constants = include_str!("environment.rs").lines();
        let name = |line: &'static str| {
            line.strip_prefix("pub const ")?
                .split_once(": &str = ")
                .map(|(name, _)| name)
        };
        assert_eq!(super::ALL, Vec::from_iter(constants.filter_map(name)));
    }
}
