//! The flags of a mesh of ranks, in Accelerate's spelling, as far as it is one of data parallel groups.

use clap::Args;
use sconce_core::environment as variable;

use super::settings::Flag;

/// Groups of ranks.
#[derive(Debug, Args)]
#[command(next_help_heading = "Groups of ranks (all need --use_parallelism_config)")]
pub(crate) struct MeshArguments {
    /// Divide the ranks into groups that each hold all state; needs --use_fsdp and --fsdp_version 2
    #[arg(long = "use_parallelism_config", alias = "use-parallelism-config")]
    pub(super) use_parallelism_config: bool,

    /// Number of groups [default: 1]
    #[arg(
        long = "parallelism_config_dp_replicate_size",
        alias = "parallelism-config-dp-replicate-size",
        value_name = "N"
    )]
    dp_replicate_size: Option<u64>,

    /// Ranks of a group; the product of both is the number of ranks [default: 1]
    #[arg(
        long = "parallelism_config_dp_shard_size",
        alias = "parallelism-config-dp-shard-size",
        value_name = "N"
    )]
    dp_shard_size: Option<u64>,

    /// Accepted for Accelerate's sake: must be 1, products are not shared by ranks [default: 1]
    #[arg(
        long = "parallelism_config_tp_size",
        alias = "parallelism-config-tp-size",
        value_name = "1"
    )]
    tp_size: Option<u64>,

    /// Accepted for Accelerate's sake: must be 1, sequences are not shared by ranks [default: 1]
    #[arg(
        long = "parallelism_config_cp_size",
        alias = "parallelism-config-cp-size",
        value_name = "1"
    )]
    cp_size: Option<u64>,

    /// Accepted for Accelerate's sake: must be 1, sequences are not shared by ranks [default: 1]
    #[arg(
        long = "parallelism_config_sp_size",
        alias = "parallelism-config-sp-size",
        value_name = "1"
    )]
    sp_size: Option<u64>,
}

/// What Accelerate's launcher exports beside the sizes.
const BACKENDS: [(&str, &str); 2] = [
    ("PARALLELISM_CONFIG_CP_BACKEND", "torch"),
    ("PARALLELISM_CONFIG_SP_BACKEND", "deepspeed"),
];

impl MeshArguments {
    /// Returns the variables that tell the ranks of these flags, with Accelerate's defaults for what neither a flag nor an
    /// inherited variable says.
    pub(super) fn variables(&self, inherited: impl Fn(&str) -> Option<String>) -> Vec<(&'static str, String)> {
        if !self.use_parallelism_config {
            return Vec::new();
        }
        let is_inherited = |name| inherited(name).is_some_and(|value| !value.trim().is_empty());
        let mut variables = vec![(variable::ACCELERATE_USE_PARALLELISM_CONFIG, "true".to_owned())];
        for flag in self.flags() {
            match flag.value {
                None if is_inherited(flag.variable) => {}
                value => variables.push((flag.variable, value.unwrap_or_else(|| "1".to_owned()))),
            }
        }
        let backends = BACKENDS.into_iter().filter(|(name, _)| !is_inherited(name));
        variables.extend(backends.map(|(name, value)| (name, value.to_owned())));
        variables
    }

    /// Returns the flags.
    pub(super) fn flags(&self) -> Vec<Flag> {
        let flags = [
            (
                "--parallelism_config_dp_replicate_size",
                variable::PARALLELISM_CONFIG_DP_REPLICATE_SIZE,
                self.dp_replicate_size,
            ),
            (
                "--parallelism_config_dp_shard_size",
                variable::PARALLELISM_CONFIG_DP_SHARD_SIZE,
                self.dp_shard_size,
            ),
            (
                "--parallelism_config_tp_size",
                variable::PARALLELISM_CONFIG_TP_SIZE,
                self.tp_size,
            ),
            (
                "--parallelism_config_cp_size",
                variable::PARALLELISM_CONFIG_CP_SIZE,
                self.cp_size,
            ),
            (
                "--parallelism_config_sp_size",
                variable::PARALLELISM_CONFIG_SP_SIZE,
                self.sp_size,
            ),
        ];
        let flag = |(name, variable, value): (_, _, Option<u64>)| Flag {
            name,
            variable,
            value: value.map(|size| size.to_string()),
            keys: &[],
        };
        flags.into_iter().map(flag).collect()
    }
}
