//! The flags of sharding as DeepSpeed does it, in Accelerate's spelling.

use std::fmt;
use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};
use sconce_core::environment as variable;

use super::settings::Flag;

/// How training state is sharded.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sharding (as in DeepSpeed; all need --use_deepspeed)")]
pub(crate) struct DeepSpeedArguments {
    /// Shard training state over the ranks as DeepSpeed's ZeRO does
    #[arg(long = "use_deepspeed", alias = "use-deepspeed")]
    pub(super) use_deepspeed: bool,

    /// DeepSpeed configuration (JSON, or that in base64); what it decides takes no flag, and what it leaves "auto" may
    #[arg(long = "deepspeed_config_file", alias = "deepspeed-config-file", value_name = "FILE")]
    pub(super) deepspeed_config_file: Option<PathBuf>,

    /// ZeRO stage: 0 nothing is sharded, 1 optimizer state, 2 gradients too, 3 parameters too [default: 2]
    #[arg(
        long = "zero_stage", alias = "zero-stage", value_name = "N",
        value_parser = clap::value_parser!(u8).range(0..=3)
    )]
    zero_stage: Option<u8>,

    /// Where optimizer state lies: cpu in stages 1 to 3, nvme in stage 3
    #[arg(
        long = "offload_optimizer_device",
        alias = "offload-optimizer-device",
        value_enum,
        value_name = "DEVICE"
    )]
    offload_optimizer_device: Option<OffloadDevice>,

    /// Where sharded parameters lie while they are not gathered, in stage 3
    #[arg(
        long = "offload_param_device",
        alias = "offload-param-device",
        value_enum,
        value_name = "DEVICE"
    )]
    offload_param_device: Option<OffloadDevice>,

    /// Existing folder for optimizer state on nvme
    #[arg(
        long = "offload_optimizer_nvme_path",
        alias = "offload-optimizer-nvme-path",
        value_name = "FOLDER"
    )]
    offload_optimizer_nvme_path: Option<String>,

    /// Existing folder for parameters on nvme, the same as for optimizer state
    #[arg(
        long = "offload_param_nvme_path",
        alias = "offload-param-nvme-path",
        value_name = "FOLDER"
    )]
    offload_param_nvme_path: Option<String>,

    /// Global norm to which a step clips gradients that the program has not clipped; 0 turns clipping off
    #[arg(long = "gradient_clipping", alias = "gradient-clipping", value_name = "NORM")]
    gradient_clipping: Option<f64>,

    /// Accepted for Accelerate's sake: in stage 3 parameters are always sharded from their creation
    #[arg(
        long = "zero3_init_flag", alias = "zero3-init-flag", value_name = "true|false", action = ArgAction::Set
    )]
    zero3_init_flag: Option<bool>,

    /// Whether whole weights are gathered when a model of stage 3 is saved
    #[arg(
        long = "zero3_save_16bit_model", alias = "zero3-save-16bit-model", value_name = "true|false",
        action = ArgAction::Set
    )]
    zero3_save_16bit_model: Option<bool>,
}

/// Where state lies while it is not in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum OffloadDevice {
    None,
    Cpu,
    Nvme,
}

impl fmt::Display for OffloadDevice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::None => "none",
            Self::Cpu => "cpu",
            Self::Nvme => "nvme",
        })
    }
}

impl DeepSpeedArguments {
    /// Returns the variables that tell the ranks of these flags.
    pub(super) fn variables(&self) -> Vec<(&'static str, String)> {
        let used = self
            .use_deepspeed
            .then(|| (variable::ACCELERATE_USE_DEEPSPEED, "true".to_owned()));
        let given = self
            .flags()
            .into_iter()
            .filter_map(|flag| Some((flag.variable, flag.value?)));
        used.into_iter().chain(given).collect()
    }

    /// Returns the flags.
    pub(super) fn flags(&self) -> Vec<Flag> {
        let text = |value: &Option<String>| value.clone();
        let file = self.deepspeed_config_file.as_ref();
        let flag = |name, variable, value, keys| Flag {
            name,
            variable,
            value,
            keys,
        };
        vec![
            flag(
                "--deepspeed_config_file",
                variable::ACCELERATE_DEEPSPEED_CONFIG_FILE,
                file.map(|file| file.display().to_string()),
                &[],
            ),
            flag(
                "--zero_stage",
                variable::ACCELERATE_DEEPSPEED_ZERO_STAGE,
                shown(self.zero_stage),
                &["zero_optimization.stage"],
            ),
            flag(
                "--offload_optimizer_device",
                variable::ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE,
                shown(self.offload_optimizer_device),
                &["zero_optimization.offload_optimizer.device"],
            ),
            flag(
                "--offload_param_device",
                variable::ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE,
                shown(self.offload_param_device),
                &["zero_optimization.offload_param.device"],
            ),
            flag(
                "--offload_optimizer_nvme_path",
                variable::ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH,
                text(&self.offload_optimizer_nvme_path),
                &["zero_optimization.offload_optimizer.nvme_path"],
            ),
            flag(
                "--offload_param_nvme_path",
                variable::ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH,
                text(&self.offload_param_nvme_path),
                &["zero_optimization.offload_param.nvme_path"],
            ),
            flag(
                "--gradient_clipping",
                variable::ACCELERATE_GRADIENT_CLIPPING,
                // As Python writes it: 1.0, not 1.
                self.gradient_clipping.map(|norm| format!("{norm:?}")),
                &["gradient_clipping"],
            ),
            flag(
                "--zero3_init_flag",
                variable::ACCELERATE_DEEPSPEED_ZERO3_INIT,
                shown(self.zero3_init_flag),
                &[],
            ),
            flag(
                "--zero3_save_16bit_model",
                variable::ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL,
                shown(self.zero3_save_16bit_model),
                &["zero_optimization.stage3_gather_16bit_weights_on_model_save"],
            ),
        ]
    }
}

fn shown(value: Option<impl fmt::Display>) -> Option<String> {
    value.map(|value| value.to_string())
}
