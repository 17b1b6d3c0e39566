//! How a training program ends: one message for one mistake, whatever the number of ranks.

use std::process::ExitCode;

use sconce_core::World;

/// Parses arguments; a mistake in them is told by rank 0 only.
///
/// # Errors
/// The exit code with which the program is to end: 2, or 0 after `--help`.
pub fn parse_arguments<A: clap::Parser>() -> Result<A, ExitCode> {
    A::try_parse().map_err(|error| {
        if World::from_env().map_or(true, |world| world.is_main()) {
            // Nothing is left to do if the terminal is gone.
            let _ = error.print();
        }
        ExitCode::from(error.exit_code() as u8)
    })
}

/// Turns a program's outcome into its exit code and prints the error, unless rank 0 prints it for all.
pub fn exit_code(outcome: anyhow::Result<()>) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    let elsewhere = error
        .chain()
        .any(|cause| matches!(cause.downcast_ref(), Some(sconce_core::Error::ReportedByMain)));
    if !elsewhere {
        eprintln!("error: {error:#}");
    }
    ExitCode::FAILURE
}
