//! `sconce estimate-memory`: what training a model takes on each rank, under every strategy, and which of them fits.

mod answer;
mod arguments;
mod names;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use sconce_core::memory_estimate::{AdamTable, RunChoice};

use crate::byte_size::ByteSize;
use crate::command_error::CommandError;
use crate::terminal::print;
use answer::Answer;
pub(crate) use answer::name_of;
pub(crate) use arguments::ModelArguments;
use names::{DtypeName, StrategyName, TierName};

/// Say what training a model takes in memory on each rank: parameters, gradients, optimizer, activations, buffers
///
/// Nothing is loaded: sizes come from config.json or from the headers of weights. Every strategy is listed from the
/// cheapest to the most sparing one; with --memory, the first that fits is recommended.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct Arguments {
    #[command(flatten)]
    model: ModelArguments,

    /// Estimate these strategies only, with commas between [default: all that make sense]
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "NAMES",
        help_heading = "Strategies"
    )]
    strategy: Vec<StrategyName>,

    /// Where the optimizer state of these strategies lies
    #[arg(
        long = "offload_optimizer",
        alias = "offload-optimizer",
        value_enum,
        value_name = "WHERE",
        requires = "strategy",
        default_value = "none",
        help_heading = "Strategies"
    )]
    offload_optimizer: TierName,

    /// Where shares of sharded parameters lie
    #[arg(
        long = "offload_params",
        alias = "offload-params",
        value_enum,
        value_name = "WHERE",
        requires = "strategy",
        default_value = "none",
        help_heading = "Strategies"
    )]
    offload_params: TierName,

    /// Parts of the model keep their inputs only, and compute again in the backward
    #[arg(
        long = "activation_checkpointing",
        alias = "activation-checkpointing",
        requires = "strategy",
        help_heading = "Strategies"
    )]
    activation_checkpointing: bool,

    /// Estimate the run of this DeepSpeed configuration, its buckets and groups included, in the place of strategies
    #[arg(
        long = "deepspeed_config_file",
        alias = "deepspeed-config-file",
        value_name = "FILE",
        conflicts_with = "strategy",
        help_heading = "Strategies"
    )]
    deepspeed_config_file: Option<PathBuf>,

    /// Rows of Accelerate's table, with commas between
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "NAMES",
        default_value = "float32,float16,int8,int4",
        help_heading = "Output"
    )]
    dtypes: Vec<DtypeName>,

    /// Write one JSON object, sizes in bytes, in the place of tables
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Runs `sconce estimate-memory`.
///
/// # Errors
/// When the model cannot be read, a combination cannot be, or stdout cannot be written to.
pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let model = arguments.model.open()?;
    let mut workload = arguments.model.workload()?;
    let table = AdamTable {
        largest_layer: 4 * model.largest_layer(),
        total: 4 * model.elements(),
    };
    let given = &arguments.model;
    let (estimates, fitting) = match (&arguments.deepspeed_config_file, arguments.strategy.as_slice()) {
        (Some(file), _) => given.estimate_configuration(&model, &mut workload, file)?,
        (None, []) => given.recommend(&model, &workload)?,
        (None, strategies) => {
            let choices = strategies.iter().map(|strategy| RunChoice {
                strategy: strategy.0,
                parameters: arguments.offload_params.0,
                optimizer: arguments.offload_optimizer.0,
                recompute: arguments.activation_checkpointing,
            });
            given.estimate(&model, &workload, choices)?
        }
    };
    let answer = Answer {
        path: &arguments.model.model,
        model: &model,
        workload: &workload,
        rows: Vec::from_iter(arguments.dtypes.iter().map(|dtype: &DtypeName| table.row(dtype.0))),
        estimates: &estimates,
        fitting,
        memory: arguments.model.memory.map(|ByteSize(bytes)| bytes),
        host_memory: arguments.model.host_memory.map(|ByteSize(bytes)| bytes),
    };
    print(&if arguments.json { answer.json() } else { answer.text() })?;
    Ok(ExitCode::SUCCESS)
}
