//! The flags of sharding as FSDP does it, in Accelerate's spelling.
//!
//! Their values are text: what they may be is known where the ranks read them, and
//! [`settings`](super::settings) asks there.

use clap::{ArgAction, Args};
use sconce_core::environment as variable;
use sconce_fsdp::{AutoWrapPolicy, Named};

use super::settings::Flag;
use crate::command_error::CommandError;

/// How training state is sharded, in FSDP's terms.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sharding (as in FSDP; all need --use_fsdp)")]
pub(crate) struct FullyShardedArguments {
    /// Shard training state over the ranks as PyTorch's FSDP does
    #[arg(long = "use_fsdp", alias = "use-fsdp")]
    pub(super) use_fsdp: bool,

    /// Whose names and defaults hold: 1 or 2 [default: 1]
    #[arg(long = "fsdp_version", alias = "fsdp-version", value_name = "N")]
    version: Option<String>,

    /// Version 1: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, or 1 to 5 [default: FULL_SHARD]
    #[arg(
        long = "fsdp_sharding_strategy",
        alias = "fsdp-sharding-strategy",
        value_name = "STRATEGY"
    )]
    sharding_strategy: Option<String>,

    /// Version 2: true or false; version 1: the strategy by another name [default: true]
    #[arg(
        long = "fsdp_reshard_after_forward",
        alias = "fsdp-reshard-after-forward",
        value_name = "true|false|STRATEGY"
    )]
    reshard_after_forward: Option<String>,

    /// Which parts of the model are gathered together: TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP
    /// [default: NO_WRAP]
    #[arg(
        long = "fsdp_auto_wrap_policy",
        alias = "fsdp-auto-wrap-policy",
        value_name = "POLICY"
    )]
    auto_wrap_policy: Option<String>,

    /// Classes for TRANSFORMER_BASED_WRAP, with commas between; without them, all parts that the model declares
    #[arg(
        long = "fsdp_transformer_layer_cls_to_wrap",
        alias = "fsdp-transformer-layer-cls-to-wrap",
        value_name = "CLASSES"
    )]
    transformer_layer_cls_to_wrap: Option<String>,

    /// Least number of elements for SIZE_BASED_WRAP [default: 100000000]
    #[arg(long = "fsdp_min_num_params", alias = "fsdp-min-num-params", value_name = "N")]
    min_num_params: Option<String>,

    /// When the next part of the backward is gathered: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH
    #[arg(
        long = "fsdp_backward_prefetch",
        alias = "fsdp-backward-prefetch",
        value_name = "PREFETCH"
    )]
    backward_prefetch: Option<String>,

    /// Version 1: whether the next part of the forward is gathered ahead [default: false]
    #[arg(
        long = "fsdp_forward_prefetch", alias = "fsdp-forward-prefetch", value_name = "true|false",
        value_parser = boolean, action = ArgAction::Set
    )]
    forward_prefetch: Option<bool>,

    /// Whether shares and optimizer state lie on the host [default: false]
    #[arg(
        long = "fsdp_offload_params", alias = "fsdp-offload-params", value_name = "true|false",
        value_parser = boolean, action = ArgAction::Set
    )]
    offload_params: Option<bool>,

    /// Whether parts compute again in the backward rather than keep what they computed [default: false]
    #[arg(
        long = "fsdp_activation_checkpointing", alias = "fsdp-activation-checkpointing", value_name = "true|false",
        value_parser = boolean, action = ArgAction::Set
    )]
    activation_checkpointing: Option<bool>,

    /// Accepted for Accelerate's sake: must be false, what parts keep for the backward stays where they compute
    /// [default: false]
    #[arg(
        verbatim_doc_comment,
        long = "fsdp_activation_checkpointing_offload", alias = "fsdp-activation-checkpointing-offload",
        value_name = "true|false", value_parser = boolean, action = ArgAction::Set
    )]
    activation_checkpointing_offload: Option<bool>,

    /// How state is saved: FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT
    #[arg(long = "fsdp_state_dict_type", alias = "fsdp-state-dict-type", value_name = "TYPE")]
    state_dict_type: Option<String>,

    /// Accepted for Accelerate's sake: parameters always keep their names and shapes [default: true]
    #[arg(
        long = "fsdp_use_orig_params", alias = "fsdp-use-orig-params", value_name = "true|false",
        value_parser = boolean, action = ArgAction::Set
    )]
    use_orig_params: Option<bool>,

    /// Accepted for Accelerate's sake: each rank reads only its share of the weights [default: true]
    #[arg(
        long = "fsdp_cpu_ram_efficient_loading", alias = "fsdp-cpu-ram-efficient-loading", value_name = "true|false",
        value_parser = boolean, action = ArgAction::Set
    )]
    cpu_ram_efficient_loading: Option<bool>,

    /// Accepted for Accelerate's sake: all ranks always begin with the same values [default: true]
    #[arg(
        long = "fsdp_sync_module_states", alias = "fsdp-sync-module-states", value_name = "true|false",
        value_parser = boolean, action = ArgAction::Set
    )]
    sync_module_states: Option<bool>,
}

/// What Accelerate's launcher exports where its user says nothing, so that programs of both kinds can read it.
const DEFAULTS: [(&str, &str); 11] = [
    (variable::FSDP_VERSION, "1"),
    (variable::FSDP_SHARDING_STRATEGY, "FULL_SHARD"),
    (variable::FSDP_RESHARD_AFTER_FORWARD, "true"),
    (variable::FSDP_OFFLOAD_PARAMS, "false"),
    (variable::FSDP_MIN_NUM_PARAMS, "100000000"),
    (variable::FSDP_FORWARD_PREFETCH, "false"),
    (variable::FSDP_USE_ORIG_PARAMS, "true"),
    (variable::FSDP_CPU_RAM_EFFICIENT_LOADING, "true"),
    (variable::FSDP_SYNC_MODULE_STATES, "true"),
    (variable::FSDP_ACTIVATION_CHECKPOINTING, "false"),
    (variable::FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD, "false"),
];

impl FullyShardedArguments {
    /// Returns the variables that tell the ranks of these flags, with Accelerate's defaults for what neither a flag nor an
    /// inherited variable says.
    pub(super) fn variables(&self, inherited: impl Fn(&str) -> Option<String>) -> Vec<(&'static str, String)> {
        if !self.use_fsdp {
            return Vec::new();
        }
        let mut variables = vec![(variable::ACCELERATE_USE_FSDP, "true".to_owned())];
        let given = self.flags().into_iter();
        variables.extend(given.filter_map(|flag| Some((flag.variable, flag.value?))));
        for (name, value) in DEFAULTS {
            let is_inherited = inherited(name).is_some_and(|value| !value.trim().is_empty());
            if !is_inherited && variables.iter().all(|(given, _)| *given != name) {
                variables.push((name, value.to_owned()));
            }
        }
        variables
    }

    /// Returns the flags.
    pub(super) fn flags(&self) -> Vec<Flag> {
        let text = |value: &Option<String>| value.clone();
        let shown = |value: Option<bool>| value.map(|value| value.to_string());
        let flags = [
            ("--fsdp_version", variable::FSDP_VERSION, text(&self.version)),
            (
                "--fsdp_sharding_strategy",
                variable::FSDP_SHARDING_STRATEGY,
                text(&self.sharding_strategy),
            ),
            (
                "--fsdp_reshard_after_forward",
                variable::FSDP_RESHARD_AFTER_FORWARD,
                text(&self.reshard_after_forward),
            ),
            (
                "--fsdp_auto_wrap_policy",
                variable::FSDP_AUTO_WRAP_POLICY,
                text(&self.auto_wrap_policy),
            ),
            (
                "--fsdp_transformer_layer_cls_to_wrap",
                variable::FSDP_TRANSFORMER_CLS_TO_WRAP,
                text(&self.transformer_layer_cls_to_wrap),
            ),
            (
                "--fsdp_min_num_params",
                variable::FSDP_MIN_NUM_PARAMS,
                text(&self.min_num_params),
            ),
            (
                "--fsdp_backward_prefetch",
                variable::FSDP_BACKWARD_PREFETCH,
                text(&self.backward_prefetch),
            ),
            (
                "--fsdp_forward_prefetch",
                variable::FSDP_FORWARD_PREFETCH,
                shown(self.forward_prefetch),
            ),
            (
                "--fsdp_offload_params",
                variable::FSDP_OFFLOAD_PARAMS,
                shown(self.offload_params),
            ),
            (
                "--fsdp_activation_checkpointing",
                variable::FSDP_ACTIVATION_CHECKPOINTING,
                shown(self.activation_checkpointing),
            ),
            (
                "--fsdp_activation_checkpointing_offload",
                variable::FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD,
                shown(self.activation_checkpointing_offload),
            ),
            (
                "--fsdp_state_dict_type",
                variable::FSDP_STATE_DICT_TYPE,
                text(&self.state_dict_type),
            ),
            (
                "--fsdp_use_orig_params",
                variable::FSDP_USE_ORIG_PARAMS,
                shown(self.use_orig_params),
            ),
            (
                "--fsdp_cpu_ram_efficient_loading",
                variable::FSDP_CPU_RAM_EFFICIENT_LOADING,
                shown(self.cpu_ram_efficient_loading),
            ),
            (
                "--fsdp_sync_module_states",
                variable::FSDP_SYNC_MODULE_STATES,
                shown(self.sync_module_states),
            ),
        ];
        let flag = |(name, variable, value)| Flag {
            name,
            variable,
            value,
            keys: &[],
        };
        flags.into_iter().map(flag).collect()
    }

    /// Refuses a size that no policy looks at. (As a variable it may stand alone: Accelerate always exports it.)
    pub(super) fn check(&self, of_ranks: impl Fn(&str) -> Option<String>) -> Result<(), CommandError> {
        let policy = of_ranks(variable::FSDP_AUTO_WRAP_POLICY);
        let policy = policy.and_then(|name| AutoWrapPolicy::from_name(name.trim()));
        if self.min_num_params.is_none() || policy == Some(AutoWrapPolicy::SizeBased) {
            return Ok(());
        }
        let needs = "--fsdp_min_num_params needs --fsdp_auto_wrap_policy SIZE_BASED_WRAP";
        Err(CommandError::usage(needs))
    }
}

/// Reads Accelerate's spellings of a yes or no.
pub(super) fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "t" | "yes" | "y" | "on" | "1" => Ok(true),
        "false" | "f" | "no" | "n" | "off" | "0" => Ok(false),
        _ => Err("expected true or false".to_owned()),
    }
}
