//! The flags of `sconce launch`, in Accelerate's spelling, and what they name as the program to run.
//!
//! Every flag written with underscores is also accepted with dashes. An unknown flag is always an error here, never
//! taken for one of the program's own: a misspelt `--num_processes` must not quietly start a single rank.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::configured::FromFiles;
use super::deepspeed::DeepSpeedArguments;
use super::fp8::Fp8Arguments;
use super::fully_sharded::FullyShardedArguments;
use super::gpu_ids::GpuIds;
use super::log_files::LogArguments;
use super::machines::MachineArguments;
use super::mesh::MeshArguments;
use super::program_kind::ProgramKind;
use super::settings::Flag;
use crate::command_error::CommandError;
use sconce_collectives::Backend;
use sconce_core::environment as variable;

const EXAMPLES: &str = "\
Examples:
  Four CPU ranks of a program, with its own arguments:
    sconce launch --cpu --num_processes 4 ./target/release/train --lr 1e-3

  Build an example of this workspace in release mode, then run two ranks of it:
    sconce launch -n 2 --gradient_accumulation_steps 4 --example finetune_llama -- --steps 100

  Eight ranks on the hosts of a file, over MPI:
    sconce launch -n 8 --mpirun_hostfile hosts ./target/release/train

  On two machines, four ranks on each; the same on both but for --machine_rank, with SCONCE_STORE_SECRET exported:
    sconce launch -n 8 --num_machines 2 --machine_rank 0 --main_process_ip node1 ./train

  The same in a job of Slurm, with a launcher on each node:
    srun --ntasks-per-node=1 sconce launch -n 8 ./train

  One rank, with input and output left as they are:
    sconce launch ./train

Exit code: 0 when every rank ended with 0; otherwise that of the first rank that failed (128 + N if signal N ended
it), or 128 + N when signal N stopped the launcher. 2 for a wrong command line, 1 when nothing could be started.";

/// Start a program once per rank, on this machine or several, and supervise the ranks
///
/// Each rank finds its place in the environment (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...).
/// When one fails, the others are stopped, all are started again where --max_restarts allows it, and the failure is
/// reported. A Python script is given to python3.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    allow_negative_numbers = true,
    override_usage = "sconce launch [OPTIONS] PROGRAM [--] [ARGS]...\n       \
                      sconce launch [OPTIONS] --example NAME [--] [ARGS]...\n       \
                      sconce launch [OPTIONS] --bin NAME [--] [ARGS]...",
    after_help = EXAMPLES
)]
pub(crate) struct Arguments {
    /// Program to start (found in PATH unless it holds a slash) and its arguments, which need no `--`.
    /// With --example or --bin: only the arguments; put `--` before them if the first starts with a dash
    #[arg(verbatim_doc_comment, value_name = "PROGRAM_AND_ARGS", trailing_var_arg = true)]
    words: Vec<OsString>,

    /// Configuration file: YAML, JSON or TOML; Accelerate's, DeepSpeed's or `sconce config`'s. Of several, a later one wins.
    /// Flags and variables win over files [default: accelerate/default_config.yaml in HF_HOME, XDG_CACHE_HOME/huggingface
    /// or ~/.cache/huggingface if it is there, unless --cpu is given]
    #[arg(
        verbatim_doc_comment,
        long = "config_file",
        alias = "config-file",
        value_name = "FILE",
        help_heading = "Configuration"
    )]
    pub(super) config_files: Vec<PathBuf>,

    /// What files add to the command line.
    #[arg(skip)]
    pub(super) from_files: FromFiles,

    /// How many ranks to start, on all machines together [default: 1 on each]
    #[arg(
        long = "num_processes", alias = "num-processes", short = 'n', value_name = "N",
        value_parser = at_least_one, help_heading = "Resources"
    )]
    pub(super) num_processes: Option<usize>,

    /// Make the ranks compute on the CPU even where there is an accelerator
    #[arg(long, aliases = ["use_cpu", "use-cpu"], help_heading = "Resources")]
    pub(super) cpu: bool,

    /// Accepted for Accelerate's sake: several ranks, which compute on a GPU each with --backend nccl
    #[arg(
        long = "multi_gpu",
        alias = "multi-gpu",
        conflicts_with_all = ["cpu", "use_deepspeed", "use_fsdp"],
        help_heading = "Resources"
    )]
    pub(super) multi_gpu: bool,

    /// GPUs of this host that the ranks may use: numbers from 0 with commas between, one for each rank, or all;
    /// sets CUDA_VISIBLE_DEVICES. Ranks compute on them with SCONCE_DEVICE=cuda or --backend nccl
    /// [default: CUDA_VISIBLE_DEVICES, or all]
    #[arg(
        verbatim_doc_comment,
        long = "gpu_ids",
        alias = "gpu-ids",
        value_name = "IDS",
        allow_hyphen_values = true,
        help_heading = "Resources"
    )]
    pub(super) gpu_ids: Option<GpuIds>,

    /// Bind each rank to its share of this host's usable cores, near its GPU where the system says which those are
    /// [default: ACCELERATE_CPU_AFFINITY]
    #[arg(
        verbatim_doc_comment,
        long = "enable_cpu_affinity",
        alias = "enable-cpu-affinity",
        help_heading = "Resources"
    )]
    pub(super) enable_cpu_affinity: bool,

    /// What carries the data: shm, the memory of this host, or mpi, for which mpirun starts the ranks, here or on
    /// other hosts, and the program must be built with the feature mpi, or nccl, for ranks with a GPU each, with the
    /// feature nccl [default: SCONCE_BACKEND, or shm]
    #[arg(
        verbatim_doc_comment,
        long,
        value_enum,
        value_name = "BACKEND",
        help_heading = "Resources"
    )]
    pub(super) backend: Option<BackendName>,

    /// File with the hosts for mpirun, one a line, such as `node1 slots=4`; makes the backend mpi
    #[arg(
        long = "mpirun_hostfile",
        alias = "mpirun-hostfile",
        value_name = "FILE",
        help_heading = "Resources"
    )]
    pub(super) mpirun_hostfile: Option<PathBuf>,

    /// Threads of each rank: RAYON_NUM_THREADS and OMP_NUM_THREADS. Without it, those of them that are
    /// unset get this host's usable cores divided by the number of ranks (at least 1)
    #[arg(
        verbatim_doc_comment,
        long = "num_cpu_threads_per_process", alias = "num-cpu-threads-per-process", value_name = "N",
        value_parser = threads, help_heading = "Resources"
    )]
    pub(super) num_cpu_threads_per_process: Option<usize>,

    /// Build this example with cargo, then start it
    #[arg(long, value_name = "NAME", conflicts_with = "bin", help_heading = "Building")]
    example: Option<String>,

    /// Build this binary with cargo, then start it
    #[arg(long, value_name = "NAME", help_heading = "Building")]
    bin: Option<String>,

    /// Package that holds the example or binary
    #[arg(long, short = 'p', value_name = "PKG", help_heading = "Building")]
    package: Option<String>,

    /// Cargo features to build with
    #[arg(long, short = 'F', value_name = "F", help_heading = "Building")]
    features: Vec<String>,

    /// Cargo profile to build with [default: release]
    #[arg(long, value_name = "PROFILE", help_heading = "Building")]
    profile: Option<String>,

    /// What the ranks compute in: f32, or bf16 or f16 with f32 masters (f16 with a scaled loss), or bf16 with products emulated in fp8
    #[arg(
        long = "mixed_precision",
        alias = "mixed-precision",
        value_enum,
        value_name = "PRECISION",
        help_heading = "Training"
    )]
    pub(super) mixed_precision: Option<MixedPrecision>,

    /// Micro-batches to accumulate before each optimizer step
    #[arg(
        long = "gradient_accumulation_steps", alias = "gradient-accumulation-steps", value_name = "N",
        value_parser = at_least_one, help_heading = "Training"
    )]
    pub(super) gradient_accumulation_steps: Option<usize>,

    #[command(flatten)]
    pub(super) machines: MachineArguments,

    #[command(flatten)]
    pub(super) logs: LogArguments,

    #[command(flatten)]
    pub(super) kind: ProgramKind,

    #[command(flatten)]
    pub(super) deepspeed: DeepSpeedArguments,

    #[command(flatten)]
    pub(super) fully_sharded: FullyShardedArguments,

    #[command(flatten)]
    pub(super) mesh: MeshArguments,

    #[command(flatten)]
    pub(super) fp8: Fp8Arguments,

    /// Compare the shapes of all ranks' tensors before every collective on tensors
    #[arg(long, help_heading = "Training")]
    pub(super) debug: bool,

    /// Address that MASTER_ADDR names: one of this host's [default: 127.0.0.1]; with several machines, where machine
    /// 0 is reached by all
    #[arg(
        verbatim_doc_comment,
        long = "main_process_ip",
        alias = "main-process-ip",
        value_name = "ADDRESS",
        help_heading = "Rendezvous"
    )]
    pub(super) main_process_ip: Option<String>,

    /// Port that MASTER_PORT names; it must be free. 0 chooses a free one [default: 0]. With several machines, the port
    /// of machine 0 at which the launchers meet [default: 29500]; the ranks then get the ones after it, where they are free
    #[arg(
        verbatim_doc_comment,
        long = "main_process_port",
        alias = "main-process-port",
        value_name = "PORT",
        help_heading = "Rendezvous"
    )]
    pub(super) main_process_port: Option<u16>,

    /// Write nothing but the ranks' output and errors of the command line; the exit code tells the rest
    #[arg(long, short = 'q', help_heading = "Supervision")]
    pub(super) quiet: bool,

    /// Print what would be started, the changed environment and the command of every rank, and start nothing
    #[arg(long = "dry_run", alias = "dry-run", help_heading = "Supervision")]
    pub(super) dry_run: bool,

    /// Do not write `[rank N] ` before the lines of the ranks
    #[arg(long = "no_prefix", alias = "no-prefix", help_heading = "Supervision")]
    pub(super) no_prefix: bool,

    /// Time that ranks have to end after the first failure or the signal to stop; then SIGKILL
    #[arg(
        long = "kill_grace", alias = "kill-grace", value_name = "SECONDS", default_value = "10",
        value_parser = seconds, help_heading = "Supervision"
    )]
    pub(super) kill_grace: Duration,
}

/// A backend, as users name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum BackendName {
    Shm,
    Mpi,
    Nccl,
}

impl BackendName {
    /// The backend of that name.
    pub(super) fn backend(self) -> Backend {
        match self {
            Self::Shm => Backend::Shm,
            Self::Mpi => Backend::Mpi,
            Self::Nccl => Backend::Nccl,
        }
    }
}

/// The number format that the ranks compute in, as Accelerate names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum MixedPrecision {
    No,
    Bf16,
    Fp16,
    Fp8,
}

impl MixedPrecision {
    /// The value of `ACCELERATE_MIXED_PRECISION`.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::Bf16 => "bf16",
            Self::Fp16 => "fp16",
            Self::Fp8 => "fp8",
        }
    }
}

/// What the ranks shall run, before anything is built or looked up.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// A program that exists already, as the user wrote it.
    Program(OsString),
    /// A program that cargo is to build first.
    Cargo(CargoTarget),
}

/// An example or binary of a cargo workspace, and how to build it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CargoTarget {
    pub(super) kind: CargoTargetKind,
    pub(super) name: String,
    pub(super) package: Option<String>,
    pub(super) features: Vec<String>,
    pub(super) profile: String,
}

/// The kind of a [`CargoTarget`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CargoTargetKind {
    Example,
    Bin,
}

impl fmt::Display for CargoTargetKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Example => "example",
            Self::Bin => "bin",
        })
    }
}

impl Arguments {
    /// The name of the ranks' role.
    pub(super) fn role(&self) -> &str {
        self.machines.role.as_deref().unwrap_or("default")
    }

    /// How often the ranks may be started again.
    pub(super) fn max_restarts(&self) -> usize {
        self.machines.max_restarts.unwrap_or(0)
    }

    /// Returns the variables that tell the ranks what the run is, beside those that they inherit.
    pub(super) fn settings_variables(&self, inherited: impl Fn(&str) -> Option<String>) -> Vec<(&'static str, String)> {
        let training = self.training_flags();
        let training = training
            .into_iter()
            .filter_map(|flag| Some((flag.variable, flag.value?)));
        let sharding = self.deepspeed.variables().into_iter();
        let sharding = sharding.chain(self.fully_sharded.variables(&inherited));
        let groups = self.mesh.variables(&inherited);
        training
            .chain(sharding)
            .chain(groups)
            .chain(self.fp8.variables())
            .collect()
    }

    /// Returns those of these flags that a DeepSpeed configuration may decide too.
    pub(super) fn training_flags(&self) -> [Flag; 2] {
        [
            Flag {
                name: "--mixed_precision",
                variable: variable::ACCELERATE_MIXED_PRECISION,
                value: self.mixed_precision.map(|precision| precision.as_str().to_owned()),
                keys: &["fp16.enabled", "bf16.enabled"],
            },
            Flag {
                name: "--gradient_accumulation_steps",
                variable: variable::ACCELERATE_GRADIENT_ACCUMULATION_STEPS,
                value: self.gradient_accumulation_steps.map(|steps| steps.to_string()),
                keys: &["gradient_accumulation_steps"],
            },
        ]
    }

    /// Separates what to run from the arguments that it gets.
    ///
    /// One `--` right after PROGRAM is a separator; any other belongs to the program.
    ///
    /// # Errors
    /// When nothing is named, or cargo options come with a program that cargo does not build.
    pub(super) fn target(&self) -> Result<(Target, Vec<OsString>), CommandError> {
        let named = match (&self.example, &self.bin) {
            (Some(name), _) => Some((CargoTargetKind::Example, name)),
            (None, Some(name)) => Some((CargoTargetKind::Bin, name)),
            (None, None) => None,
        };
        if let Some((kind, name)) = named {
            if let Some(flag) = self.kind.of_scripts() {
                return Err(CommandError::usage(format!("{flag} does not go with --{kind}")));
            }
            let target = CargoTarget {
                kind,
                name: name.clone(),
                package: self.package.clone(),
                features: self.features.clone(),
                profile: self.profile.clone().unwrap_or_else(|| "release".to_owned()),
            };
            return Ok((Target::Cargo(target), self.words.clone()));
        }

        let Some((program, rest)) = self.words.split_first() else {
            return Err(CommandError::usage("nothing to launch")
                .hint("name a program, or an example or binary to build: --example NAME, --bin NAME")
                .hint("`sconce launch --help` shows all options"));
        };
        let cargo_option = [
            ("--package", self.package.is_some()),
            ("--features", !self.features.is_empty()),
            ("--profile", self.profile.is_some()),
        ];
        if let Some((option, _)) = cargo_option.iter().find(|(_, given)| *given) {
            return Err(
                CommandError::usage(format!("{option} needs --example or --bin")).hint(format!(
                    "{} is started as it is; only examples and binaries are built",
                    program.display()
                )),
            );
        }
        let arguments = match rest.split_first() {
            Some((separator, arguments)) if separator == "--" => arguments,
            _ => rest,
        };
        Ok((Target::Program(program.clone()), arguments.to_vec()))
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("at least 1 is needed".to_owned()),
        Ok(count) => Ok(count),
        Err(_) => Err("a whole number of at least 1 is needed".to_owned()),
    }
}

/// More threads than any host has cores for make a program hang in starting them.
fn threads(text: &str) -> Result<usize, String> {
    match at_least_one(text)? {
        count if count > 1024 => Err("at most 1024 are started".to_owned()),
        count => Ok(count),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let parsed = text
        .parse::<f64>()
        .map_err(|_| "a number of seconds is needed".to_owned())?;
    Duration::try_from_secs_f64(parsed).map_err(|_| "a number of seconds, 0 or more, is needed".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;

    #[derive(Debug, Parser)]
    struct Launch {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn parse(words: &[&str]) -> Result<Arguments, clap::Error> {
        Launch::try_parse_from([&["launch"], words].concat()).map(|launch| launch.arguments)
    }

    fn program_and_arguments(words: &[&str]) -> (Target, Vec<OsString>) {
        parse(words).unwrap().target().unwrap()
    }

    fn program(name: &str) -> Target {
        Target::Program(name.into())
    }

    #[test]
    fn the_command_definition_is_consistent() {
        Launch::command().debug_assert();
    }

    #[test]
    fn every_flag_with_an_underscore_is_accepted_with_dashes() {
        for argument in Launch::command().get_arguments() {
            let Some(long) = argument.get_long().filter(|long| long.contains('_')) else {
                continue;
            };
            let aliases = argument.get_all_aliases().unwrap_or_default();
            assert!(
                aliases.contains(&long.replace('_', "-").as_str()),
                "--{long} has aliases {aliases:?}"
            );
        }
    }

    #[test]
    fn what_follows_the_program_is_its_own() {
        let words = ["-n", "2", "train", "--num_processes", "7", "-x", "a b"];
        assert_eq!(parse(&words).unwrap().num_processes, Some(2));
        let arguments = ["--num_processes", "7", "-x", "a b"].map(OsString::from).to_vec();
        assert_eq!(program_and_arguments(&words), (program("train"), arguments));
    }

    #[test]
    fn a_negative_number_is_a_bad_value_not_an_unknown_flag() {
        for words in [["-n", "-2", "train"], ["--num_cpu_threads_per_process", "-5", "train"]] {
            let error = parse(&words).unwrap_err().to_string();
            assert!(error.contains(&format!("invalid value '{}'", words[1])), "{error}");
        }
    }

    #[test]
    fn only_the_separator_right_after_the_program_is_dropped() {
        let expected = (program("train"), ["a", "--", "b"].map(OsString::from).to_vec());
        assert_eq!(program_and_arguments(&["train", "--", "a", "--", "b"]), expected);
        assert_eq!(program_and_arguments(&["--", "train", "a", "--", "b"]), expected);
    }

    #[test]
    fn with_an_example_all_words_are_arguments() {
        let (target, arguments) = program_and_arguments(&["--example", "llama", "-n", "2", "--", "--lr", "--", "1"]);
        let Target::Cargo(target) = target else {
            panic!("not a cargo target: {target:?}")
        };
        assert_eq!((target.kind, target.name.as_str()), (CargoTargetKind::Example, "llama"));
        assert_eq!(target.profile, "release");
        assert_eq!(arguments, ["--lr", "--", "1"]);
    }

    #[test]
    fn a_misspelt_flag_is_never_taken_for_the_programs() {
        assert!(parse(&["--num_proceses", "4", "train"]).is_err());
        assert!(parse(&["--example", "llama", "--num_proceses", "4"]).is_err());
    }

    #[test]
    fn cargo_options_need_something_to_build() {
        let error = parse(&["--features", "cuda", "train"]).unwrap().target().unwrap_err();
        assert!(
            error.to_string().contains("--features needs --example or --bin"),
            "{error}"
        );
    }

    #[test]
    fn the_grace_may_be_a_fraction_but_not_negative() {
        assert_eq!(
            parse(&["--kill_grace", "0.25", "train"]).unwrap().kill_grace,
            Duration::from_millis(250)
        );
        assert!(parse(&["--kill_grace=-1", "train"]).is_err());
    }
}
