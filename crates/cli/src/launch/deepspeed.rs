//! The flags of sharding, in Accelerate's spelling, and what is checked of them before anything starts.
//!
//! What the ranks will read is made from the flags and resolved here first, by the same code: so a wrong combination or a
//! bad configuration file is one message of the launcher's, not one per rank.

use std::fmt::{self, Write};
use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};
use sconce_core::deepspeed::DeepSpeedConfig;
use sconce_core::environment as variable;
use sconce_core::{AcceleratorBuilder, Error, RunSettings};

use super::arguments::Arguments;
use crate::command_error::CommandError;

/// How training state is sharded.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sharding (as in DeepSpeed; all need --use_deepspeed)")]
pub(crate) struct DeepSpeedArguments {
    /// Shard training state over the ranks as DeepSpeed's ZeRO does
    #[arg(long = "use_deepspeed", alias = "use-deepspeed")]
    pub(super) use_deepspeed: bool,

    /// DeepSpeed configuration (JSON); what it decides takes no flag, and what it leaves "auto" may
    #[arg(long = "deepspeed_config_file", alias = "deepspeed-config-file", value_name = "FILE")]
    deepspeed_config_file: Option<PathBuf>,

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

/// A flag that the ranks read as a variable.
pub(super) struct Flag {
    pub(super) name: &'static str,
    pub(super) variable: &'static str,
    pub(super) value: Option<String>,
    /// The keys in a configuration that decide the same.
    pub(super) keys: &'static [&'static str],
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

    fn flags(&self) -> Vec<Flag> {
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
                shown(self.gradient_clipping),
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

/// Checks what the flags, and the variables that the ranks inherit (`inherited`), ask for together.
///
/// Returns what the user should know of the configuration file, as one message.
///
/// # Errors
/// Flags without effect, a configuration that cannot be used, a combination that cannot be.
pub(super) fn check(
    arguments: &Arguments,
    inherited: impl Fn(&str) -> Option<String>,
) -> Result<Option<String>, CommandError> {
    let flags = arguments.deepspeed.flags();
    if !arguments.deepspeed.use_deepspeed {
        let idle = Vec::from_iter(flags.iter().filter(|flag| flag.value.is_some()).map(|flag| flag.name));
        return match idle.as_slice() {
            [] => Ok(None),
            [one] => Err(CommandError::usage(format!("{one} needs --use_deepspeed"))),
            several => Err(CommandError::usage(format!(
                "{} need --use_deepspeed",
                several.join(", ")
            ))),
        };
    }
    let all = flags.into_iter().chain(arguments.training_flags());
    let given = Vec::from_iter(all.filter(|flag| flag.value.is_some()));
    let of_flags = arguments.settings_variables();
    let lookup = |name: &str| {
        let of_flag = of_flags.iter().find(|(variable, _)| *variable == name);
        of_flag.map(|(_, value)| value.clone()).or_else(|| inherited(name))
    };
    if let Some(file) = &arguments.deepspeed.deepspeed_config_file {
        let config = DeepSpeedConfig::read(file, Default::default()).map_err(CommandError::usage)?;
        refuse_what_is_decided(&given, &config)?;
    }
    let settings = AcceleratorBuilder::default()
        .settings(arguments.num_processes, lookup)
        .map_err(|error| CommandError::usage(in_flags(&error, &given)))?;
    if let Some(folder) = settings.disk.as_ref().map(|disk| &disk.folder)
        && !folder.is_dir()
    {
        let error = CommandError::usage(format!("there is no folder {} for state on nvme", folder.display()));
        return Err(error.hint("make it on a local disk, or name another"));
    }
    Ok(warning(&settings))
}

/// Accelerate's rule: a flag and a file must not say the same thing twice.
fn refuse_what_is_decided(given: &[Flag], config: &DeepSpeedConfig) -> Result<(), CommandError> {
    let decided = Vec::from_iter(given.iter().filter_map(|flag| {
        let key = flag.keys.iter().find(|key| config.states(key))?;
        Some(format!("{} (`{key}`)", flag.name))
    }));
    if decided.is_empty() {
        return Ok(());
    }
    let file = config.file();
    let error = CommandError::usage(format!("{file} decides already: {}", decided.join(", ")));
    Err(error.hint("leave these flags out, or write \"auto\" in the file for what flags are to decide"))
}

/// The message of an error in the settings; what a flag has set has the flag's name.
fn in_flags(error: &Error, given: &[Flag]) -> String {
    if let Error::Setting {
        setting,
        value,
        expected,
    } = error
        && let Some(flag) = given.iter().find(|flag| flag.variable == *setting)
    {
        return format!("{} {value}: {expected}", flag.name);
    }
    error.to_string()
}

fn warning(settings: &RunSettings) -> Option<String> {
    let config = settings
        .deepspeed
        .as_ref()
        .filter(|config| !config.warnings().is_empty())?;
    let mut message = format!("warning: {}\n", config.file());
    for warning in config.warnings() {
        let _ = writeln!(message, "  {warning}");
    }
    Some(message)
}
