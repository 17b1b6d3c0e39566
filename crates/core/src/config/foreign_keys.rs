//! Keys of Accelerate's that are known and mean nothing here, or cannot be had; each with the reason.

use crate::deepspeed::Node;

/// A key that is known, and why nothing follows from it: where it asks for something, that is a warning.
#[derive(Debug)]
pub(super) struct ForeignKey {
    path: &'static str,
    /// Values that ask for nothing, beside none, false, 0, "no" and what is empty.
    defaults: &'static [&'static str],
    pub(super) reason: &'static str,
}

const TPU: &str = "candle does not run on TPUs";
const COMPILED: &str = "candle compiles no graphs: nothing is lost but torch.compile's speed";
const OTHER_FP8: &str = "fp8 is computed by Sconce itself, not by Transformer Engine, torchao or MS-AMP";
const HOSTS: &str = "start `sconce launch` on every machine, or name the hosts in mpirun_config.mpirun_hostfile";
const MOE: &str = "parts of a model are gathered as the model declares them";
const MESH: &str = "only dp_replicate_size and dp_shard_size are used";
const MEGATRON: &str = "Megatron-LM is a library for PyTorch; shard with DEEPSPEED or FSDP";
const SAGEMAKER: &str = "jobs on SageMaker are not started from here; start `sconce launch` inside of the job";

const fn idle(path: &'static str, defaults: &'static [&'static str], reason: &'static str) -> ForeignKey {
    ForeignKey { path, defaults, reason }
}

const KEYS: &[ForeignKey] = &[
    idle("tpu_name", &[], TPU),
    idle("tpu_zone", &[], TPU),
    idle("tpu_vm", &[], TPU),
    idle("tpu_env", &[], TPU),
    idle("tpu_use_cluster", &[], TPU),
    idle("tpu_use_sudo", &[], TPU),
    idle("command_file", &[], TPU),
    idle("commands", &[], TPU),
    idle("main_training_function", &["main"], TPU),
    idle("downcast_bf16", &[], TPU),
    idle("dynamo_config.dynamo_backend", &[], COMPILED),
    idle("dynamo_config.dynamo_mode", &["default"], COMPILED),
    idle("dynamo_config.dynamo_use_fullgraph", &[], COMPILED),
    idle("dynamo_config.dynamo_use_dynamic", &[], COMPILED),
    idle("dynamo_config.dynamo_use_regional_compilation", &[], COMPILED),
    idle("deepspeed_config.deepspeed_multinode_launcher", &["standard"], HOSTS),
    idle("deepspeed_config.deepspeed_hostfile", &[], HOSTS),
    idle("deepspeed_config.deepspeed_exclusion_filter", &[], HOSTS),
    idle("deepspeed_config.deepspeed_inclusion_filter", &[], HOSTS),
    idle("deepspeed_config.deepspeed_moe_layer_cls_names", &[], MOE),
    idle("parallelism_config.parallelism_config_cp_backend", &["torch"], MESH),
    idle(
        "parallelism_config.parallelism_config_cp_comm_strategy",
        &["allgather"],
        MESH,
    ),
    idle("parallelism_config.parallelism_config_sp_backend", &["deepspeed"], MESH),
    idle("parallelism_config.parallelism_config_sp_seq_length", &[], MESH),
    idle(
        "parallelism_config.parallelism_config_sp_seq_length_is_variable",
        &["true"],
        MESH,
    ),
    idle(
        "parallelism_config.parallelism_config_sp_attn_implementation",
        &["sdpa"],
        MESH,
    ),
    idle("fp8_config.backend", &[], OTHER_FP8),
    idle("fp8_config.use_autocast_during_eval", &[], OTHER_FP8),
    idle(
        "fp8_config.override_linear_precision",
        &["(false, false, false)"],
        OTHER_FP8,
    ),
    idle("fp8_config.opt_level", &["O2"], OTHER_FP8),
    idle("fp8_config.optimization_level", &["O2"], OTHER_FP8),
    idle("fp8_config.enable_fsdp_float8_all_gather", &["true"], OTHER_FP8),
    idle("fp8_config.pad_inner_dim", &["true"], OTHER_FP8),
    idle("mpirun_config.mpirun_ccl", &["1"], "oneCCL is a library for PyTorch"),
];

/// Sections whose keys all mean nothing.
const SECTIONS: [(&str, &str); 2] = [
    ("megatron_lm_config", MEGATRON),
    ("ipex_config", "IPEX is a library for PyTorch"),
];

/// Returns what is known of a key that is no setting.
pub(super) fn foreign_key(path: &str) -> Option<&'static ForeignKey> {
    KEYS.iter().find(|key| key.path == path)
}

/// Returns why a section means nothing.
pub(super) fn foreign_section(name: &str) -> Option<&'static str> {
    SECTIONS
        .iter()
        .find(|(section, _)| *section == name)
        .map(|(_, reason)| *reason)
}

/// Returns why a value of a key that is a setting cannot be had, where another system can.
pub(super) fn refused_value(path: &str, value: &str) -> Option<&'static str> {
    match (path, value.to_ascii_uppercase().as_str()) {
        ("compute_environment", "AMAZON_SAGEMAKER") => Some(SAGEMAKER),
        ("distributed_type", "MEGATRON_LM") => Some(MEGATRON),
        ("distributed_type", "XLA" | "TPU") => Some(TPU),
        ("distributed_type", device) if device.starts_with("MULTI_") => {
            let known = ["NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON"];
            let device = device.trim_start_matches("MULTI_");
            known
                .contains(&device)
                .then_some("candle runs on CPUs and NVIDIA's GPUs; use MULTI_CPU or MULTI_GPU")
        }
        ("fp8_config.fp8_format", "E5M2") => Some("E5M2 has too few digits for values; use HYBRID or E4M3"),
        _ => None,
    }
}

/// Paths of all such keys, for the names nearest to an unknown one.
pub(super) fn paths() -> impl Iterator<Item = &'static str> {
    KEYS.iter().map(|key| key.path)
}

impl ForeignKey {
    /// Says whether a value asks for something.
    pub(super) fn asks(&self, value: &Node) -> bool {
        match value {
            Node::Null => false,
            Node::Flag(flag) => *flag && !self.defaults.contains(&"true"),
            Node::Text(text) => {
                let text = text.trim();
                let nothing = ["", "no", "none", "false", "0"];
                let is_among = |names: &[&str]| names.iter().any(|name| name.eq_ignore_ascii_case(text));
                !is_among(&nothing) && !is_among(self.defaults)
            }
            Node::Number(number) => {
                let text = number.to_string();
                text != "0" && !self.defaults.contains(&text.as_str())
            }
            Node::List(items) => !items.is_empty(),
            Node::Object(entries) => !entries.is_empty(),
        }
    }
}
