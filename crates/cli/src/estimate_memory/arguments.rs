//! What `estimate-memory` and `plan` both ask: the model, the world, how it is trained, and the memory that there is.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use sconce_core::AcceleratorBuilder;
use sconce_core::deepspeed::MixedPrecision;
use sconce_core::environment as variable;
use sconce_core::memory_estimate::{
    ComputeDevice, Limits, MemoryEstimate, ModelShape, OptimizerKind, RunChoice, Workload, candidates,
};

use crate::byte_size::ByteSize;
use crate::command_error::CommandError;
use crate::own_ranks::at_least_one;

/// Estimates, and which of them is the first that fits.
pub(crate) type Estimates = (Vec<MemoryEstimate>, Option<usize>);

/// The model, the world, how it is trained, and the memory that there is.
#[derive(Debug, Args)]
pub(crate) struct ModelArguments {
    /// A HuggingFace folder or its config.json (Llama, Mistral, Qwen 2 and 3, CogVideoX's transformer), a safetensors file or a
    /// folder of them, or a checkpoint of Sconce's
    #[arg(value_name = "MODEL")]
    pub(crate) model: PathBuf,

    /// Ranks over all machines
    #[arg(
        long = "num_processes", alias = "num-processes", visible_alias = "world", short = 'n', value_name = "N",
        default_value_t = 1, value_parser = at_least_one, help_heading = "World"
    )]
    pub(crate) num_processes: usize,

    /// Machines, each with as many ranks
    #[arg(
        long = "num_machines", alias = "num-machines", value_name = "N",
        default_value_t = 1, value_parser = at_least_one, help_heading = "World"
    )]
    pub(crate) num_machines: usize,

    /// What the ranks compute on
    #[arg(
        long,
        value_enum,
        value_name = "DEVICE",
        default_value = "cpu",
        help_heading = "World"
    )]
    pub(crate) device: DeviceName,

    /// What the model computes in; f32 masters stand behind 16 bits
    #[arg(
        long = "mixed_precision",
        alias = "mixed-precision",
        value_enum,
        value_name = "PRECISION",
        default_value = "no",
        help_heading = "Training"
    )]
    pub(crate) mixed_precision: PrecisionName,

    /// The update rule
    #[arg(
        long,
        value_enum,
        value_name = "NAME",
        default_value = "adamw",
        help_heading = "Training"
    )]
    pub(crate) optimizer: OptimizerName,

    /// Samples of one forward on one rank
    #[arg(
        long = "batch_size", alias = "batch-size", value_name = "N",
        default_value_t = 1, value_parser = at_least_one, help_heading = "Training"
    )]
    pub(crate) batch_size: usize,

    /// Tokens of a sample [default: what the model takes, at most 2048 of text]
    #[arg(
        long = "sequence_length", alias = "sequence-length", value_name = "N",
        value_parser = at_least_one, help_heading = "Training"
    )]
    pub(crate) sequence_length: Option<usize>,

    /// Memory of each rank's device, such as 24GiB; on the CPU, of each rank
    #[arg(long, value_name = "SIZE", help_heading = "Memory")]
    pub(crate) memory: Option<ByteSize>,

    /// Memory of each machine, which its ranks share
    #[arg(
        long = "host_memory",
        alias = "host-memory",
        value_name = "SIZE",
        help_heading = "Memory"
    )]
    pub(crate) host_memory: Option<ByteSize>,
}

/// What the ranks compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceName {
    Cpu,
    Cuda,
}

/// A precision, as Accelerate names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PrecisionName {
    No,
    Bf16,
    Fp16,
}

/// An update rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub(crate) enum OptimizerName {
    AdamW,
    Adam,
    Lion,
    Adagrad,
    /// With momentum
    Momentum,
    Sgd,
}

impl ModelArguments {
    /// Reads the model's shapes.
    ///
    /// # Errors
    /// When there is no model, or it is damaged or of an architecture that is not known.
    pub(crate) fn open(&self) -> Result<ModelShape, CommandError> {
        ModelShape::open(&self.model).map_err(CommandError::failure)
    }

    /// What is to be trained how.
    ///
    /// # Errors
    /// When the ranks cannot be spread evenly.
    pub(crate) fn workload(&self) -> Result<Workload, CommandError> {
        let (ranks, machines) = (self.num_processes, self.num_machines);
        if !ranks.is_multiple_of(machines) {
            return Err(CommandError::usage(format!(
                "--num_processes {ranks} cannot be spread evenly over --num_machines {machines}"
            ))
            .hint("give the number of ranks over all machines, a multiple of the number of machines"));
        }
        Ok(Workload {
            ranks,
            ranks_per_host: ranks / machines,
            precision: match self.mixed_precision {
                PrecisionName::No => MixedPrecision::No,
                PrecisionName::Bf16 => MixedPrecision::Bf16,
                PrecisionName::Fp16 => MixedPrecision::Fp16,
            },
            optimizer: match self.optimizer {
                OptimizerName::AdamW => OptimizerKind::AdamW,
                OptimizerName::Adam => OptimizerKind::Adam,
                OptimizerName::Lion => OptimizerKind::Lion,
                OptimizerName::Adagrad => OptimizerKind::Adagrad,
                OptimizerName::Momentum => OptimizerKind::SgdMomentum,
                OptimizerName::Sgd => OptimizerKind::Sgd,
            },
            batch: self.batch_size,
            sequence: self.sequence_length,
            computes_on: match self.device {
                DeviceName::Cpu => ComputeDevice::Cpu,
                DeviceName::Cuda => ComputeDevice::Cuda,
            },
        })
    }

    /// Estimates all choices that make sense, the cheapest first, and finds the first that fits.
    ///
    /// # Errors
    /// As [`ModelArguments::estimate`].
    pub(crate) fn recommend(&self, model: &ModelShape, workload: &Workload) -> Result<Estimates, CommandError> {
        self.estimate(model, workload, candidates(workload))
    }

    /// Estimates choices, and finds the first that fits into the memory that is given.
    ///
    /// # Errors
    /// For a combination that no run can have.
    pub(crate) fn estimate(
        &self,
        model: &ModelShape,
        workload: &Workload,
        choices: impl IntoIterator<Item = RunChoice>,
    ) -> Result<Estimates, CommandError> {
        let estimates = choices
            .into_iter()
            .map(|choice| MemoryEstimate::new(model, workload, choice));
        let estimates = estimates.collect::<Result<Vec<_>, _>>().map_err(CommandError::usage)?;
        Ok(self.with_first_that_fits(estimates, workload))
    }

    /// Estimates the run of a DeepSpeed configuration, whose precision becomes the workload's.
    ///
    /// # Errors
    /// For a configuration that cannot be used.
    pub(crate) fn estimate_configuration(
        &self,
        model: &ModelShape,
        workload: &mut Workload,
        file: &Path,
    ) -> Result<Estimates, CommandError> {
        let precision = (self.mixed_precision != PrecisionName::No).then(|| workload.precision.to_string());
        let settings = AcceleratorBuilder::default().settings(workload.ranks, |name| match name {
            variable::ACCELERATE_USE_DEEPSPEED => Some("true".to_owned()),
            variable::ACCELERATE_DEEPSPEED_CONFIG_FILE => Some(file.display().to_string()),
            variable::ACCELERATE_MIXED_PRECISION => precision.clone(),
            _ => None,
        });
        let settings = settings.map_err(CommandError::usage)?;
        workload.precision = settings.precision;
        let estimate = MemoryEstimate::of_run(model, workload, &settings).map_err(CommandError::usage)?;
        Ok(self.with_first_that_fits(Vec::from_iter(estimate), workload))
    }

    fn with_first_that_fits(&self, estimates: Vec<MemoryEstimate>, workload: &Workload) -> Estimates {
        let has_limits = self.memory.is_some() || self.host_memory.is_some();
        let limits = Limits {
            device: self.memory.map_or(u64::MAX, |ByteSize(bytes)| bytes),
            host: self.host_memory.map(|ByteSize(bytes)| bytes),
        };
        let first = estimates
            .iter()
            .position(|estimate| limits.fit(estimate, workload.computes_on));
        (estimates, first.filter(|_| has_limits))
    }
}
