//! `sconce config default`: a file for this machine, without questions.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use sconce_core::config::Configuration;

use super::FileArgument;
use crate::command_error::CommandError;
use crate::launch::gpus_of_host;
use crate::terminal::print;

/// Write a configuration file for this machine, without questions: a rank for each GPU, or one on the CPU
///
/// Accelerate reads it too. A file that is there is not overwritten.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    file: FileArgument,

    /// What the model computes in
    #[arg(
        long = "mixed_precision",
        alias = "mixed-precision",
        value_name = "PRECISION",
        default_value = "no"
    )]
    mixed_precision: Precision,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Precision {
    No,
    Fp16,
    Bf16,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, CommandError> {
    let file = arguments.file.file()?;
    if file.exists() {
        return Err(CommandError::failure(format!("{} is there already", file.display()))
            .hint("change it with an editor or `sconce config`, or remove it first"));
    }
    let precision = match arguments.mixed_precision {
        Precision::No => "no",
        Precision::Fp16 => "fp16",
        Precision::Bf16 => "bf16",
    };
    let configuration = of_machine(gpus_of_host(), precision).map_err(CommandError::failure)?;
    configuration.write(&file, &|_| None).map_err(CommandError::failure)?;
    print(&format!("wrote {}\nnow run: sconce launch PROGRAM\n", file.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// What Accelerate's `config default` writes, but for what is of TPUs.
fn of_machine(gpus: usize, precision: &str) -> Result<Configuration, sconce_core::config::ConfigurationError> {
    let mut configuration = Configuration::new();
    let ranks = gpus.max(1).to_string();
    for (path, text) in [
        ("compute_environment", "LOCAL_MACHINE"),
        ("debug", "false"),
        ("distributed_type", if gpus > 1 { "MULTI_GPU" } else { "NO" }),
        ("enable_cpu_affinity", "false"),
        ("machine_rank", "0"),
        ("mixed_precision", precision),
        ("num_machines", "1"),
        ("num_processes", &ranks),
        ("rdzv_backend", "static"),
        ("same_network", "false"),
        ("use_cpu", if gpus == 0 { "true" } else { "false" }),
    ] {
        configuration.set(path, text)?;
    }
    Ok(configuration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_type_follow_from_the_gpus() {
        for (gpus, kind, ranks, on_cpu) in [
            (0, "NO", "1", "true"),
            (1, "NO", "1", "false"),
            (4, "MULTI_GPU", "4", "false"),
        ] {
            let configuration = of_machine(gpus, "bf16").unwrap();
            let value = |path| configuration.value(path).unwrap().to_string();
            assert_eq!(
                [value("distributed_type"), value("num_processes"), value("use_cpu")],
                [kind, ranks, on_cpu]
            );
        }
    }
}
