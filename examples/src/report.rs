//! How a training program ends: one message for one mistake, whatever the number of ranks.

use std::process::ExitCode;

use sconce_core::{Accelerator, Error, World};

/// Parses arguments; a mistake in them is told by rank 0 only.
///
/// # Errors
/// The exit code with which the program is to end: 2, or 0 after `--help`.
pub fn parse_arguments<A: clap::Parser>() -> Result<A, ExitCode> {
    A::try_parse().map_err(|error| {
        if is_main() {
            // Nothing is left to do if the terminal is gone.
            let _ = error.print();
        }
        ExitCode::from(error.exit_code() as u8)
    })
}

/// Runs a training program and prints its error, if it fails.
///
/// A mistake that all ranks have noticed together ([`sconce_core::Error::Together`]) is printed by rank 0, and nobody
/// leaves before it is.
pub fn run(
    accelerator: sconce_core::Result<Box<dyn Accelerator>>,
    program: impl FnOnce(&dyn Accelerator) -> anyhow::Result<()>,
) -> ExitCode {
    let (accelerator, outcome) = match accelerator {
        Ok(accelerator) => {
            tell(&*accelerator, &accelerator.settings().notices(accelerator.device()));
            let outcome = program(&*accelerator);
            (Some(accelerator), outcome)
        }
        Err(error) => (None, Err(error.into())),
    };
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    let shared = error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(Error::Together { .. }) => Some(true),
        Some(Error::ReportedByMain) => Some(false),
        _ => None,
    });
    // Every rank finds the same mistake in a setting or a loop by itself.
    let is_everywhere = error
        .chain()
        .any(|cause| cause.downcast_ref().is_some_and(is_found_by_all));
    if shared != Some(false) && (is_main() || !is_everywhere) {
        eprintln!("error: {error:#}");
        sconce_core::failure_file::leave_for_launcher(&format!("{error:#}"));
    }
    if let (Some(accelerator), Some(_)) = (accelerator, shared) {
        // A failure here has nothing to add.
        let _ = accelerator.wait_for_everyone();
    }
    ExitCode::FAILURE
}

/// Prints what is to be told of a model that has been prepared.
pub fn tell_of_model(accelerator: &dyn Accelerator) {
    tell(accelerator, &accelerator.engine().notices());
}

/// Prints the warnings of trackers that failed since the last call.
pub fn tell_of_trackers(accelerator: &dyn Accelerator) {
    let warnings = accelerator.tracker_warnings();
    warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
}

fn tell(accelerator: &dyn Accelerator, notices: &[String]) {
    if accelerator.is_main_process() {
        notices.iter().for_each(|notice| eprintln!("note: {notice}"));
    }
}

/// Prints what rank 0 holds of the training state, and what it has moved in `steps` optimizer steps.
pub fn print(accelerator: &dyn Accelerator, steps: u64) {
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    let memory = accelerator.memory();
    accelerator.print(format_args!(
        "memory of a rank, MiB: parameters {:.2}, gathered at most {:.2}, gradients {:.2}, optimizer state {:.2}, \
         buffers {:.2}",
        mib(memory.parameters + memory.masters),
        mib(memory.gathered_peak),
        mib(memory.gradients),
        mib(memory.optimizer_state),
        mib(memory.buffers + memory.spare)
    ));
    for traffic in accelerator.traffic() {
        accelerator.print(format_args!(
            "moved by {}: {:.1} calls and {:.2} MiB a step",
            traffic.kind.name(),
            traffic.calls as f64 / steps as f64,
            mib(traffic.bytes) / steps as f64
        ));
    }
}

/// Says whether an error is one that all ranks run into, since they run one program with one configuration.
fn is_found_by_all(error: &Error) -> bool {
    use sconce_zero::Error as Zero;
    match error {
        Error::Setting { .. }
        | Error::Contradictions { .. }
        | Error::DeepSpeed(_)
        | Error::FullySharded(_)
        | Error::Exclusive { .. }
        | Error::Order { .. }
        | Error::Disagreement { .. }
        | Error::Loader { .. } => true,
        Error::Zero(error) => matches!(
            error,
            Zero::Setting { .. } | Zero::LossShape { .. } | Zero::NoGradient { .. } | Zero::Order { .. }
        ),
        _ => false,
    }
}

fn is_main() -> bool {
    World::from_env().map_or(true, |world| world.is_main())
}
