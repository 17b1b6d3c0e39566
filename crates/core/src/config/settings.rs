//! Every setting, in the order in which people read them: Accelerate's keys, and a section of our own.
//!
//! The keys, flags and variables are Accelerate's, so that one file serves both; what Accelerate does not know is in the
//! section `sconce_config`. From this table follow reading, writing, merging, the schema, and what `sconce launch` is told.

use super::setting::Setting;
use super::value::Kind::{Flag, Machines, Number, OneOf, Text, Whole, Words};
use crate::environment as variable;
use sconce_collectives::environment::SCONCE_BACKEND;

/// Where DeepSpeed's settings are.
pub const DEEPSPEED: &str = "deepspeed_config";
/// Where FSDP's settings are.
pub const FSDP: &str = "fsdp_config";
/// Where the sizes of the mesh are.
pub const PARALLELISM: &str = "parallelism_config";
/// Where fp8's settings are.
pub const FP8: &str = "fp8_config";
/// Where MPI's settings are.
pub const MPIRUN: &str = "mpirun_config";
/// Where settings are that Accelerate does not have.
pub const SCONCE: &str = "sconce_config";

/// The sections, with what begins their keys and may be left out.
pub(super) const SECTIONS: [(&str, &str); 6] = [
    (DEEPSPEED, ""),
    (FSDP, "fsdp_"),
    (PARALLELISM, "parallelism_config_"),
    (FP8, "fp8_"),
    (MPIRUN, ""),
    (SCONCE, ""),
];

/// The key that says which way state is sharded.
pub const DISTRIBUTED_TYPE: &str = "distributed_type";
/// The key that names a DeepSpeed configuration, or has one.
pub const DEEPSPEED_FILE: &str = "deepspeed_config.deepspeed_config_file";
/// The key of the accumulation steps: in `deepspeed_config` in files for Accelerate.
pub const ACCUMULATION_STEPS: &str = "sconce_config.gradient_accumulation_steps";

const PRECISIONS: &[&str] = &["no", "fp16", "bf16", "fp8"];
const DEVICES: &[&str] = &["none", "cpu", "nvme"];
const STRATEGIES: &[&str] = &[
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
    "1",
    "2",
    "3",
    "4",
    "5",
];
const RESHARDING: &[&str] = &[
    "true",
    "false",
    "FULL_SHARD",
    "SHARD_GRAD_OP",
    "NO_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_ZERO2",
];

/// All of them.
pub const SETTINGS: &[Setting] = &[
    Setting::new(
        "compute_environment",
        OneOf(&["LOCAL_MACHINE"]),
        "Where ranks run: here, or on machines that each run the launcher",
    )
    .default("LOCAL_MACHINE"),
    Setting::new(
        DISTRIBUTED_TYPE,
        OneOf(&["NO", "MULTI_CPU", "MULTI_GPU", "DEEPSPEED", "FSDP"]),
        "How training is spread: DEEPSPEED and FSDP shard state as their sections say, the others do not shard",
    )
    .default("NO"),
    Setting::new("mixed_precision", OneOf(PRECISIONS), "What the model computes in")
        .flag("mixed_precision")
        .variable(variable::ACCELERATE_MIXED_PRECISION)
        .default("no"),
    Setting::new("use_cpu", Flag, "Compute on the CPU even where there is a GPU")
        .flag("cpu")
        .variable(variable::ACCELERATE_USE_CPU)
        .default("false")
        .aliases(&["cpu"]),
    Setting::new(
        "debug",
        Flag,
        "Compare the shapes of all ranks' tensors before every collective on tensors",
    )
    .flag("debug")
    .variable(variable::ACCELERATE_DEBUG_MODE)
    .default("false"),
    Setting::new("num_processes", Whole(1), "Ranks, over all machines")
        .flag("num_processes")
        .default("1"),
    Setting::new(
        "num_machines",
        Machines,
        "Machines, or the least and the most of them: MIN:MAX",
    )
    .flag("num_machines")
    .default("1"),
    Setting::new("machine_rank", Whole(0), "Which of the machines this is, from 0")
        .flag("machine_rank")
        .default("0"),
    Setting::new("gpu_ids", Words, "GPUs of this host that the ranks may use, or all").flag("gpu_ids"),
    Setting::new("main_process_ip", Text, "Address of machine 0").flag("main_process_ip"),
    Setting::new("main_process_port", Whole(0), "Port on machine 0; 0 is a free one").flag("main_process_port"),
    Setting::new(
        "rdzv_backend",
        OneOf(&["static", "c10d"]),
        "How machines find each other",
    )
    .flag("rdzv_backend")
    .default("static"),
    Setting::new("same_network", Flag, "Whether the machines are on one network")
        .flag("same_network")
        .default("false"),
    Setting::new(
        "enable_cpu_affinity",
        Flag,
        "Bind each rank to its share of the host's cores",
    )
    .flag("enable_cpu_affinity")
    .variable(variable::ACCELERATE_CPU_AFFINITY)
    .default("false"),
    // DeepSpeed
    Setting::new(
        DEEPSPEED_FILE,
        Text,
        "File with a DeepSpeed configuration, in place of this section's other keys",
    )
    .flag("deepspeed_config_file")
    .variable(variable::ACCELERATE_DEEPSPEED_CONFIG_FILE),
    Setting::new(
        "deepspeed_config.zero_stage",
        OneOf(&["0", "1", "2", "3"]),
        "ZeRO stage: 0 nothing is sharded, 1 optimizer state, 2 gradients too, 3 parameters too",
    )
    .flag("zero_stage")
    .variable(variable::ACCELERATE_DEEPSPEED_ZERO_STAGE)
    .default("2"),
    Setting::new(
        "deepspeed_config.offload_optimizer_device",
        OneOf(DEVICES),
        "Where optimizer state lies: cpu in stages 1 to 3, nvme in stage 3",
    )
    .flag("offload_optimizer_device")
    .variable(variable::ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE)
    .default("none"),
    Setting::new(
        "deepspeed_config.offload_param_device",
        OneOf(DEVICES),
        "Where sharded parameters lie while they are not gathered, in stage 3",
    )
    .flag("offload_param_device")
    .variable(variable::ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE)
    .default("none"),
    Setting::new(
        "deepspeed_config.offload_optimizer_nvme_path",
        Text,
        "Existing folder for optimizer state on nvme",
    )
    .flag("offload_optimizer_nvme_path")
    .variable(variable::ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH),
    Setting::new(
        "deepspeed_config.offload_param_nvme_path",
        Text,
        "Existing folder for parameters on nvme, the same as for optimizer state",
    )
    .flag("offload_param_nvme_path")
    .variable(variable::ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH),
    Setting::new(
        "deepspeed_config.gradient_clipping",
        Number,
        "Global norm to which a step clips gradients that the program has not clipped; 0 turns clipping off",
    )
    .flag("gradient_clipping")
    .variable(variable::ACCELERATE_GRADIENT_CLIPPING),
    Setting::new(
        "deepspeed_config.zero3_init_flag",
        Flag,
        "Known for Accelerate's sake: in stage 3 parameters are always sharded from their creation",
    )
    .flag("zero3_init_flag")
    .variable(variable::ACCELERATE_DEEPSPEED_ZERO3_INIT),
    Setting::new(
        "deepspeed_config.zero3_save_16bit_model",
        Flag,
        "Whether whole weights are gathered when a model of stage 3 is saved",
    )
    .flag("zero3_save_16bit_model")
    .variable(variable::ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL),
    // FSDP
    Setting::new(
        "fsdp_config.fsdp_version",
        OneOf(&["1", "2"]),
        "Whose names and defaults hold",
    )
    .flag("fsdp_version")
    .variable(variable::FSDP_VERSION)
    .default("1"),
    Setting::new(
        "fsdp_config.fsdp_sharding_strategy",
        OneOf(STRATEGIES),
        "Version 1: what is sharded, by name or by its number from 1",
    )
    .flag("fsdp_sharding_strategy")
    .variable(variable::FSDP_SHARDING_STRATEGY)
    .default("FULL_SHARD"),
    Setting::new(
        "fsdp_config.fsdp_reshard_after_forward",
        OneOf(RESHARDING),
        "Version 2: whether parameters are released after the forward; version 1: the strategy by another name",
    )
    .flag("fsdp_reshard_after_forward")
    .variable(variable::FSDP_RESHARD_AFTER_FORWARD)
    .default("true"),
    Setting::new(
        "fsdp_config.fsdp_auto_wrap_policy",
        OneOf(&["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]),
        "Which parts of the model are gathered together",
    )
    .flag("fsdp_auto_wrap_policy")
    .variable(variable::FSDP_AUTO_WRAP_POLICY)
    .default("NO_WRAP"),
    Setting::new(
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        Words,
        "Classes for TRANSFORMER_BASED_WRAP; without them, all parts that the model declares",
    )
    .flag("fsdp_transformer_layer_cls_to_wrap")
    .variable(variable::FSDP_TRANSFORMER_CLS_TO_WRAP),
    Setting::new(
        "fsdp_config.fsdp_min_num_params",
        Whole(1),
        "Least number of elements of a part, for SIZE_BASED_WRAP",
    )
    .flag("fsdp_min_num_params")
    .variable(variable::FSDP_MIN_NUM_PARAMS)
    .default("100000000"),
    Setting::new(
        "fsdp_config.fsdp_backward_prefetch",
        OneOf(&["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]),
        "Version 1: when the next part of the backward is gathered",
    )
    .flag("fsdp_backward_prefetch")
    .variable(variable::FSDP_BACKWARD_PREFETCH)
    .aliases(&["fsdp_config.fsdp_backward_prefetch_policy"]),
    Setting::new(
        "fsdp_config.fsdp_forward_prefetch",
        Flag,
        "Version 1: whether the next part of the forward is gathered ahead",
    )
    .flag("fsdp_forward_prefetch")
    .variable(variable::FSDP_FORWARD_PREFETCH)
    .default("false"),
    Setting::new(
        "fsdp_config.fsdp_offload_params",
        Flag,
        "Whether shares and optimizer state lie on the host",
    )
    .flag("fsdp_offload_params")
    .variable(variable::FSDP_OFFLOAD_PARAMS)
    .default("false"),
    Setting::new(
        "fsdp_config.fsdp_activation_checkpointing",
        Flag,
        "Whether parts compute again in the backward rather than keep what they computed",
    )
    .flag("fsdp_activation_checkpointing")
    .variable(variable::FSDP_ACTIVATION_CHECKPOINTING)
    .default("false"),
    Setting::new(
        "fsdp_config.fsdp_activation_checkpointing_offload",
        Flag,
        "Whether kept inputs of parts go to the host: not supported, must be false",
    )
    .flag("fsdp_activation_checkpointing_offload")
    .variable(variable::FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD)
    .default("false"),
    Setting::new(
        "fsdp_config.fsdp_state_dict_type",
        OneOf(&["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]),
        "How state is saved",
    )
    .flag("fsdp_state_dict_type")
    .variable(variable::FSDP_STATE_DICT_TYPE),
    Setting::new(
        "fsdp_config.fsdp_use_orig_params",
        Flag,
        "Known for Accelerate's sake: parameters always keep their names and shapes",
    )
    .flag("fsdp_use_orig_params")
    .variable(variable::FSDP_USE_ORIG_PARAMS)
    .default("true"),
    Setting::new(
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        Flag,
        "Known for Accelerate's sake: each rank reads only its share of the weights",
    )
    .flag("fsdp_cpu_ram_efficient_loading")
    .variable(variable::FSDP_CPU_RAM_EFFICIENT_LOADING)
    .default("true"),
    Setting::new(
        "fsdp_config.fsdp_sync_module_states",
        Flag,
        "Known for Accelerate's sake: all ranks always begin with the same values",
    )
    .flag("fsdp_sync_module_states")
    .variable(variable::FSDP_SYNC_MODULE_STATES)
    .default("true"),
    Setting::new(
        "fsdp_config.fsdp_ignored_modules",
        Text,
        "Modules that are not sharded: a regular expression on their whole names",
    )
    .variable(variable::FSDP_IGNORED_MODULES),
    // The mesh
    Setting::new(
        "parallelism_config.parallelism_config_dp_replicate_size",
        Whole(1),
        "Groups of ranks that each hold all state, under FSDP version 2",
    )
    .flag("parallelism_config_dp_replicate_size")
    .variable(variable::PARALLELISM_CONFIG_DP_REPLICATE_SIZE)
    .default("1"),
    Setting::new(
        "parallelism_config.parallelism_config_dp_shard_size",
        Whole(1),
        "Ranks of a group, which share its state",
    )
    .flag("parallelism_config_dp_shard_size")
    .variable(variable::PARALLELISM_CONFIG_DP_SHARD_SIZE)
    .default("1"),
    Setting::new(
        "parallelism_config.parallelism_config_tp_size",
        Whole(1),
        "Ranks that share each product of matrices: not supported, must be 1",
    )
    .flag("parallelism_config_tp_size")
    .variable(variable::PARALLELISM_CONFIG_TP_SIZE)
    .default("1"),
    Setting::new(
        "parallelism_config.parallelism_config_cp_size",
        Whole(1),
        "Ranks that share each sequence: not supported, must be 1",
    )
    .flag("parallelism_config_cp_size")
    .variable(variable::PARALLELISM_CONFIG_CP_SIZE)
    .default("1"),
    Setting::new(
        "parallelism_config.parallelism_config_sp_size",
        Whole(1),
        "Ranks that share each sequence, as Ulysses does: not supported, must be 1",
    )
    .flag("parallelism_config_sp_size")
    .variable(variable::PARALLELISM_CONFIG_SP_SIZE)
    .default("1"),
    // fp8
    Setting::new("fp8_config.fp8_format", OneOf(&["HYBRID", "E4M3"]), "Formats of fp8")
        .flag("fp8_format")
        .variable(variable::ACCELERATE_FP8_FORMAT)
        .default("HYBRID"),
    Setting::new(
        "fp8_config.margin",
        Text,
        "Room of fp8's scales above what was seen, as a power of two",
    )
    .flag("fp8_margin")
    .variable(variable::ACCELERATE_FP8_MARGIN)
    .default("0"),
    Setting::new(
        "fp8_config.interval",
        Whole(1),
        "Backwards between two changes of fp8's scales",
    )
    .flag("fp8_interval")
    .variable(variable::ACCELERATE_FP8_INTERVAL)
    .default("1"),
    Setting::new(
        "fp8_config.amax_history_len",
        Whole(1),
        "How many greatest magnitudes fp8's scales remember",
    )
    .flag("fp8_amax_history_len")
    .variable(variable::ACCELERATE_FP8_AMAX_HISTORY_LEN)
    .default("1024")
    .aliases(&["fp8_config.amax_history_length"]),
    Setting::new(
        "fp8_config.amax_compute_algo",
        OneOf(&["max", "most_recent"]),
        "Which of them scales",
    )
    .flag("fp8_amax_compute_algo")
    .variable(variable::ACCELERATE_FP8_AMAX_COMPUTE_ALGO)
    .aliases(&["fp8_config.amax_compute_algorithm"]),
    // MPI
    Setting::new("mpirun_config.mpirun_hostfile", Text, "File with the hosts for mpirun").flag("mpirun_hostfile"),
    // Ours
    Setting::new(
        ACCUMULATION_STEPS,
        Whole(1),
        "Micro-batches to accumulate before each optimizer step",
    )
    .flag("gradient_accumulation_steps")
    .variable(variable::ACCELERATE_GRADIENT_ACCUMULATION_STEPS)
    .default("1")
    .aliases(&["deepspeed_config.gradient_accumulation_steps"]),
    Setting::new(
        "sconce_config.backend",
        OneOf(&["shm", "mpi", "nccl"]),
        "What carries data between ranks",
    )
    .flag("backend")
    .variable(SCONCE_BACKEND)
    .default("shm"),
    Setting::new(
        "sconce_config.device",
        Text,
        "What a rank computes on: cpu, cuda or cuda:N",
    )
    .variable(variable::SCONCE_DEVICE),
    Setting::new(
        "sconce_config.timeout",
        Whole(1),
        "How long a collective waits for its peers, in seconds",
    )
    .variable(variable::SCONCE_TIMEOUT)
    .default("1800"),
    Setting::new(
        "sconce_config.num_cpu_threads_per_process",
        Whole(1),
        "Threads of each rank",
    )
    .flag("num_cpu_threads_per_process"),
    Setting::new(
        "sconce_config.max_restarts",
        Whole(0),
        "How often failed ranks are started again",
    )
    .flag("max_restarts")
    .default("0"),
    Setting::new(
        "sconce_config.monitor_interval",
        Number,
        "Seconds between two looks at the ranks",
    )
    .flag("monitor_interval")
    .default("0.1"),
    Setting::new(
        "sconce_config.rdzv_conf",
        Words,
        "Settings of the rendezvous, KEY=VALUE with commas between",
    )
    .flag("rdzv_conf"),
    Setting::new("sconce_config.role", Text, "Name of the ranks' role")
        .flag("role")
        .default("default"),
    Setting::new("sconce_config.log_dir", Text, "Folder for the ranks' output").flag("log_dir"),
    Setting::new(
        "sconce_config.tee",
        Text,
        "Which output goes to files too: 0 to 3, or by rank, 0:1,1:3",
    )
    .flag("tee")
    .default("0"),
    Setting::new(
        "sconce_config.redirects",
        Text,
        "Which output goes to files only: 0 to 3, or by rank",
    )
    .flag("redirects")
    .default("0"),
    Setting::new(
        "sconce_config.kill_grace",
        Number,
        "Seconds that ranks have to end once one has failed",
    )
    .flag("kill_grace")
    .default("10"),
    Setting::new(
        "sconce_config.no_prefix",
        Flag,
        "Do not write `[rank N] ` before the lines of the ranks",
    )
    .flag("no_prefix")
    .default("false"),
];

/// Returns the setting of a key, also by another name of it.
pub fn setting(path: &str) -> Option<&'static Setting> {
    let mut all = SETTINGS.iter();
    all.find(|setting| setting.path == path || setting.aliases.contains(&path))
}
