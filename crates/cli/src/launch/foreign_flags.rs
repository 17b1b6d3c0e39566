//! Flags of Accelerate's that cannot mean anything here, each with the reason.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::command_error::CommandError;

const TPU: &str = "candle does not run on TPUs";
const COMPILED: &str = "candle compiles no graphs, so that there is nothing to choose";
const MEGATRON: &str = "Megatron-LM is a library for PyTorch; shard with --use_deepspeed or --use_fsdp";
const SAGEMAKER: &str = "jobs on SageMaker are not started from here; start `sconce launch` inside of the job";
const OTHER_FP8: &str = "fp8 is computed by Sconce itself, not by Transformer Engine, torchao or MS-AMP";
const HOSTS: &str = "start `sconce launch` on every machine, or name the hosts with --mpirun_hostfile";
const MOE: &str = "parts of a model are gathered as the model declares them";
const SEQUENCES: &str = "sequences are not shared by ranks: use --parallelism_config_dp_shard_size";

/// Flags with underscores; a name that ends with `*` stands for all that begin so.
const FLAGS: [(&str, &str); 30] = [
    ("tpu", TPU),
    ("tpu_cluster", TPU),
    ("no_tpu_cluster", TPU),
    ("tpu_use_sudo", TPU),
    ("vm", TPU),
    ("env", TPU),
    ("main_training_function", TPU),
    ("downcast_bf16", TPU),
    ("dynamo_backend", COMPILED),
    ("dynamo_mode", COMPILED),
    ("dynamo_use_fullgraph", COMPILED),
    ("dynamo_use_dynamic", COMPILED),
    ("dynamo_use_regional_compilation", COMPILED),
    ("use_megatron_lm", MEGATRON),
    ("megatron_lm_*", MEGATRON),
    ("aws_access_key_id", SAGEMAKER),
    ("aws_secret_access_key", SAGEMAKER),
    ("fp8_backend", OTHER_FP8),
    ("fp8_use_autocast_during_eval", OTHER_FP8),
    ("fp8_override_linear_precision", OTHER_FP8),
    ("fp8_opt_level", OTHER_FP8),
    ("fp8_enable_fsdp_float8_all_gather", OTHER_FP8),
    ("fp8_pad_inner_dim", OTHER_FP8),
    ("deepspeed_hostfile", HOSTS),
    ("deepspeed_exclusion_filter", HOSTS),
    ("deepspeed_inclusion_filter", HOSTS),
    ("deepspeed_multinode_launcher", HOSTS),
    ("deepspeed_moe_layer_cls_names", MOE),
    ("parallelism_config_cp_*", SEQUENCES),
    ("parallelism_config_sp_*", SEQUENCES),
];

/// Returns why a flag, without its dashes, is refused.
pub(super) fn reason(flag: &str) -> Option<&'static str> {
    let name = flag.replace('-', "_");
    let is_meant = |known: &str| match known.strip_suffix('*') {
        Some(start) => name.starts_with(start),
        None => name == known,
    };
    FLAGS
        .iter()
        .find(|(known, _)| is_meant(known))
        .map(|(_, reason)| *reason)
}

/// Words an error of clap's about an unknown flag that is one of these.
pub(crate) fn refusal(error: &clap::Error) -> Option<CommandError> {
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return None;
    };
    let name = flag.strip_prefix("--")?;
    let name = name.split_once('=').map_or(name, |(name, _)| name);
    Some(CommandError::usage(format!(
        "--{name} is not supported: {}",
        reason(name)?
    )))
}
