//! Where state lives: the stage of ZeRO and what is offloaded, and which combinations there are.

use super::Sharding;
use super::given::{Given, Origin};
use super::resolve::count;
use super::said::{Said, path};
use crate::Result;
use crate::deepspeed::{DeepSpeedConfig, GradientReduction, OffloadDevice, Setting};
use crate::environment as variable;
use sconce_zero::{DiskOptions, Tier, ZeroStage};
use std::path::PathBuf;

/// The stage and what is offloaded.
#[derive(Debug)]
pub(super) struct StateSettings {
    stage: u64,
    optimizer: Offload,
    parameters: Offload,
}

/// Where one kind of state lies while it is not in use.
#[derive(Debug)]
struct Offload {
    device: Given<OffloadDevice>,
    folder: Option<Given<String>>,
}

impl StateSettings {
    /// Finds stage and tiers, and refuses what does not go together.
    pub(super) fn new(said: &Said, file: Option<&DeepSpeedConfig>, uses_deepspeed: bool) -> Result<Self> {
        let zero = file.map(|file| (file, &file.zero_optimization));
        // Accelerate's default stage is 2, that of a DeepSpeed configuration 0.
        let by_default = match zero {
            Some((_, zero)) => zero.stage.value().unwrap_or(0),
            None if uses_deepspeed => 2,
            None => 0,
        };
        let optimizer = zero.map(|(file, zero)| (file, &zero.offload_optimizer));
        let parameters = zero.map(|(file, zero)| (file, &zero.offload_param));
        let state = Self {
            stage: said.stage.as_ref().map_or(by_default, |given| given.value),
            optimizer: Offload::new(
                (&said.offload_optimizer, &said.optimizer_folder),
                optimizer.map(|(file, section)| (file, section.device, section.nvme_path.as_deref())),
                OPTIMIZER,
            ),
            parameters: Offload::new(
                (&said.offload_param, &said.parameter_folder),
                parameters.map(|(file, section)| (file, section.device, section.nvme_path.as_deref())),
                PARAMETERS,
            ),
        };
        state.check()?;
        Ok(state)
    }

    fn check(&self) -> Result<()> {
        let stage = self.stage;
        let device = &self.parameters.device;
        if device.value != OffloadDevice::None && stage != 3 {
            let expected = format!(
                "parameters are offloaded only where they are sharded, in ZeRO stage 3, and the stage is {stage}; use \
                 stage 3, or none"
            );
            return Err(device.origin.refuse(device.value, expected));
        }
        let device = &self.optimizer.device;
        let least = match device.value {
            OffloadDevice::None => 0,
            OffloadDevice::Cpu => 1,
            OffloadDevice::Nvme => 3,
        };
        if stage < least {
            let stages = if least == 3 { "stage 3" } else { "stage 1, 2 or 3" };
            let expected = format!(
                "optimizer state goes to {} in ZeRO {stages} only, and the stage is {stage}; use {stages}, or none",
                device.value
            );
            return Err(device.origin.refuse(device.value, expected));
        }
        self.optimizer.check_folder(OPTIMIZER)?;
        self.parameters.check_folder(PARAMETERS)
    }

    /// Refuses sums of sharded parameters' gradients, as DeepSpeed does.
    pub(super) fn check_reduction(&self, config: &DeepSpeedConfig) -> Result<()> {
        if self.stage < 3 || config.gradient_allreduce_op == GradientReduction::Mean {
            return Ok(());
        }
        let origin = Origin::File(config.place("gradient_allreduce_op"));
        Err(origin.refuse("\"sum\"", "\"mean\", because the stage is 3"))
    }

    pub(super) fn sharding(&self, config: &DeepSpeedConfig) -> Sharding {
        let threshold = config.zero_optimization.param_persistence_threshold.value();
        let stage = match self.stage {
            0 => return Sharding::DataParallel,
            1 => ZeroStage::One,
            2 => ZeroStage::Two,
            _ => match threshold {
                Some(threshold) => ZeroStage::Three {
                    persistence_threshold: count(threshold),
                },
                None => ZeroStage::THREE,
            },
        };
        Sharding::Zero {
            stage,
            parameters: self.parameters.tier(),
            optimizer_state: self.optimizer.tier(),
        }
    }

    /// Returns where files lie, if there are any.
    pub(super) fn disk(&self, config: &DeepSpeedConfig) -> Result<Option<DiskOptions>> {
        let (first, second) = (self.optimizer.folder_in_use(), self.parameters.folder_in_use());
        if let (Some(first), Some(second)) = (first, second)
            && first.value != second.value
        {
            let expected = format!("one folder for all files, as in {} ({})", first.origin, first.value);
            return Err(second.origin.refuse(&second.value, expected));
        }
        Ok(first.or(second).map(|folder| DiskOptions {
            folder: PathBuf::from(&folder.value),
            sub_group_elements: count(config.zero_optimization.sub_group_size),
        }))
    }

    /// Returns what was said and does nothing.
    pub(super) fn notices(&self, said: &Said) -> Vec<String> {
        let idle = said.shard_from_creation.as_ref().and_then(|given| {
            let name = &given.origin;
            match (given.value, self.stage) {
                (true, 3) | (false, 0..3) => None,
                (true, stage) => Some(format!(
                    "{name} is true: parameters are sharded in stage 3 only, not in {stage}"
                )),
                (false, _) => Some(format!(
                    "{name} is false: in stage 3 parameters are sharded from their creation all the same"
                )),
            }
        });
        Vec::from_iter(idle)
    }
}

/// The names of one kind of offload.
struct Names {
    device: &'static str,
    folder: &'static str,
    folder_variable: &'static str,
    folder_flag: &'static str,
}

const OPTIMIZER: Names = Names {
    device: path::OPTIMIZER_DEVICE,
    folder: path::OPTIMIZER_FOLDER,
    folder_variable: variable::ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH,
    folder_flag: "--offload_optimizer_nvme_path",
};
const PARAMETERS: Names = Names {
    device: path::PARAMETER_DEVICE,
    folder: path::PARAMETER_FOLDER,
    folder_variable: variable::ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH,
    folder_flag: "--offload_param_nvme_path",
};

impl Offload {
    fn new(
        (device, folder): (&Option<Given<OffloadDevice>>, &Option<Given<String>>),
        file: Option<(&DeepSpeedConfig, Setting<OffloadDevice>, Option<&str>)>,
        names: Names,
    ) -> Self {
        let device_in_file = file.map(|(file, device, _)| Given {
            value: device.value().unwrap_or(OffloadDevice::None),
            origin: Origin::File(file.place(names.device)),
        });
        let folder_in_file = file.and_then(|(file, _, folder)| {
            Some(Given {
                value: folder?.to_owned(),
                origin: Origin::File(file.place(names.folder)),
            })
        });
        let nowhere = || Given::by_variable(variable::ACCELERATE_USE_DEEPSPEED, OffloadDevice::None);
        Self {
            device: device.clone().or(device_in_file).unwrap_or_else(nowhere),
            folder: folder.clone().or(folder_in_file),
        }
    }

    fn check_folder(&self, names: Names) -> Result<()> {
        match (self.device.value, &self.folder) {
            (OffloadDevice::Nvme, None) => {
                let expected = format!(
                    "a folder too: set {} (`sconce launch {}`) to an existing one",
                    names.folder_variable, names.folder_flag
                );
                Err(self.device.origin.refuse(self.device.value, expected))
            }
            (OffloadDevice::None | OffloadDevice::Cpu, Some(folder)) if !matches!(folder.origin, Origin::File(_)) => {
                let expected = format!(
                    "a folder is used with device nvme only, and the device is {}",
                    self.device.value
                );
                Err(folder.origin.refuse(&folder.value, expected))
            }
            _ => Ok(()),
        }
    }

    fn folder_in_use(&self) -> Option<&Given<String>> {
        self.folder
            .as_ref()
            .filter(|_| self.device.value == OffloadDevice::Nvme)
    }

    fn tier(&self) -> Tier {
        match self.device.value {
            OffloadDevice::None => Tier::Device,
            OffloadDevice::Cpu => Tier::Host,
            OffloadDevice::Nvme => Tier::Disk,
        }
    }
}
