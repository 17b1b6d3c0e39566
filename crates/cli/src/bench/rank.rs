//! One rank of `sconce bench`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use sconce_collectives::ElementType;
use sconce_collectives::measure::{Buffers, Case, Operation, median, repetitions};
use sconce_core::measure::{CheckpointPart, CheckpointTimes, StepTimes};
use sconce_core::{Accelerator, AcceleratorBuilder};
use serde::{Deserialize, Serialize};

use super::Subject;
use crate::command_error::CommandError;
use crate::own_ranks::tell_result;

/// The subcommand's name.
pub(super) const NAME: &str = "bench-rank";

/// Fewer than a bench program repeats small operations: latencies of microseconds show all the same.
const MOST_REPETITIONS: u32 = 500;

/// What a rank is told.
#[derive(Debug, Args)]
pub(crate) struct RankArguments {
    /// File to which rank 0 adds figures.
    results: PathBuf,
    /// Rounds.
    rounds: usize,
    /// Bytes of the largest buffer, and of the checkpoint.
    bytes: usize,
    /// Folder for the checkpoint.
    folder: PathBuf,
    /// What to measure.
    #[arg(value_enum)]
    subjects: Vec<Subject>,
}

/// Figures of one subject.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Figures {
    Collectives {
        ranks: usize,
        rows: Vec<CollectiveRow>,
    },
    Step {
        ranks: usize,
        rows: Vec<StepRow>,
    },
    Checkpoint {
        ranks: usize,
        bytes: u64,
        rows: Vec<CheckpointRow>,
    },
}

/// One operation on one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CollectiveRow {
    pub(super) operation: String,
    pub(super) dtype: String,
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    pub(super) algorithm_gb_per_s: Option<f64>,
    pub(super) bus_gb_per_s: Option<f64>,
}

/// One strategy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct StepRow {
    pub(super) strategy: String,
    pub(super) seconds: f64,
    pub(super) of_data_parallel: f64,
    pub(super) bytes_held: u64,
}

/// One part of saving and loading.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CheckpointRow {
    pub(super) what: String,
    pub(super) seconds: f64,
    pub(super) gb_per_s: f64,
    pub(super) of: Option<Ratio>,
}

/// How many times as long as another part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Ratio {
    pub(super) what: String,
    pub(super) ratio: f64,
}

/// Measures on this rank.
///
/// # Errors
/// When the ranks cannot meet, the group is lost, or the disk fails.
pub(crate) fn run(arguments: &RankArguments) -> Result<ExitCode, CommandError> {
    let acc = AcceleratorBuilder::default().build().map_err(CommandError::failure)?;
    for subject in &arguments.subjects {
        let figures = match subject {
            Subject::Collectives => collectives(&*acc, arguments).map_err(CommandError::failure)?,
            Subject::Step => step(&*acc, arguments)?,
            Subject::Checkpoint => checkpoint(&*acc, arguments)?,
        };
        if acc.is_main_process() {
            tell_result(&arguments.results, &figures)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a builder over the same ranks, which the environment's settings do not change.
fn builder(acc: &dyn Accelerator) -> AcceleratorBuilder {
    AcceleratorBuilder::default().communicator_of(acc.world().clone(), Arc::clone(acc.communicator()))
}

fn cases(largest: usize) -> Vec<Case> {
    use Operation::{AllGather, AllReduce, AllToAll, Barrier, Broadcast, MemcpyTogether, ReduceScatter};
    let case = |operation, element, bytes, shared| Case {
        operation,
        element,
        bytes,
        shared,
    };
    let mut cases = vec![
        case(MemcpyTogether, ElementType::U8, largest, false),
        case(Barrier, ElementType::U8, 0, false),
    ];
    let sizes = [4 << 10, 64 << 10, 1 << 20]
        .into_iter()
        .filter(|bytes| *bytes < largest);
    cases.extend(
        sizes
            .chain([largest])
            .map(|bytes| case(AllReduce, ElementType::F32, bytes, true)),
    );
    cases.push(case(AllReduce, ElementType::BF16, largest, true));
    let others = [ReduceScatter, AllGather, Broadcast];
    cases.extend(others.map(|operation| case(operation, ElementType::F32, largest, true)));
    cases.push(case(AllToAll, ElementType::F32, largest, false));
    cases
}

fn collectives(acc: &dyn Accelerator, arguments: &RankArguments) -> sconce_collectives::Result<Figures> {
    let group = &**acc.communicator();
    let cases = cases(arguments.bytes);
    let mut buffers = Buffers::new(group, arguments.bytes)?;
    let mut samples = vec![Vec::new(); cases.len()];
    // Round 0 warms up.
    for round in 0..=arguments.rounds {
        for (case, samples) in cases.iter().zip(&mut samples) {
            let repeat = repetitions(case.bytes).min(MOST_REPETITIONS);
            let seconds = buffers.sample(group, case, repeat)?;
            samples.extend((round > 0).then_some(seconds));
        }
    }
    let ranks = group.size();
    let row = |(case, samples): (&Case, Vec<f64>)| {
        let seconds = median(samples);
        let algorithm = (case.bytes > 0).then(|| case.bytes as f64 / seconds / 1e9);
        CollectiveRow {
            operation: case.operation.name().to_owned(),
            dtype: case.element.name().to_owned(),
            bytes: case.bytes as u64,
            seconds,
            algorithm_gb_per_s: algorithm,
            bus_gb_per_s: algorithm.map(|algorithm| algorithm * case.operation.bus_factor(ranks)),
        }
    };
    Ok(Figures::Collectives {
        ranks,
        rows: cases.iter().zip(samples).map(row).collect(),
    })
}

fn step(acc: &dyn Accelerator, arguments: &RankArguments) -> Result<Figures, CommandError> {
    let times = StepTimes::measure(|| builder(acc), arguments.rounds).map_err(CommandError::failure)?;
    let row = |number: usize| StepRow {
        strategy: times.0[number].strategy.to_owned(),
        seconds: median(times.0[number].seconds.clone()),
        of_data_parallel: times.of_data_parallel(number),
        bytes_held: times.0[number].held,
    };
    Ok(Figures::Step {
        ranks: acc.world().size,
        rows: (0..times.0.len()).map(row).collect(),
    })
}

fn checkpoint(acc: &dyn Accelerator, arguments: &RankArguments) -> Result<Figures, CommandError> {
    let own = arguments.folder.join(format!("sconce-bench-{}", std::process::id()));
    let folder = acc.broadcast_object(&own, 0).map_err(CommandError::failure)?;
    let made = if acc.is_main_process() {
        std::fs::create_dir(&folder).map_err(|reason| format!("{}: cannot be made: {reason}", folder.display()))
    } else {
        Ok(())
    };
    acc.together(made).map_err(CommandError::failure)?;
    let times = CheckpointTimes::measure(builder(acc), &folder, arguments.bytes, arguments.rounds);
    if acc.is_main_process() {
        let _ = std::fs::remove_dir_all(&folder);
    }
    let times = times.map_err(CommandError::failure)?;
    let row = |part: CheckpointPart| {
        let ratio = part.floor().zip(times.ratio(part));
        CheckpointRow {
            what: part.name().to_owned(),
            seconds: times.seconds(part),
            gb_per_s: times.bytes as f64 / times.seconds(part) / 1e9,
            of: ratio.map(|(floor, ratio)| Ratio {
                what: floor.name().to_owned(),
                ratio,
            }),
        }
    };
    Ok(Figures::Checkpoint {
        ranks: acc.world().size,
        bytes: times.bytes as u64,
        rows: CheckpointPart::ALL.map(row).to_vec(),
    })
}
