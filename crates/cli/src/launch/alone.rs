//! A run on this machine only: round after round until one ends well, or no restart is left.

use std::process::ExitCode;

use super::arguments::Arguments;
use super::failure;
use super::main_process::MainProcess;
use super::place::{Place, RanksStore};
use super::rendezvous::Rendezvous;
use super::round::{Job, RoundEnd};
use super::stop_signals::StopSignals;
use super::supervise::{Cause, Nobody};
use crate::command_error::CommandError;
use crate::terminal::tell;

/// Runs `job` with `ranks` ranks; `main_process` is where rank 0 may listen.
///
/// # Errors
/// When nothing could be started.
pub(super) fn run(
    job: &Job<'_>,
    arguments: &Arguments,
    ranks: usize,
    mut main_process: MainProcess,
    run_id: String,
) -> Result<ExitCode, CommandError> {
    let most = arguments.max_restarts();
    let mut signals = StopSignals::catch().map_err(super::no_signals)?;
    for restarts in 0.. {
        // Every round has a store of its own: nothing of the last one can be found there.
        let rendezvous = Rendezvous::host()?;
        let place = place(ranks, &main_process, Some(rendezvous.for_ranks()), &run_id, restarts);
        let end = job.run(&place, &mut signals, &mut Nobody)?;
        let may_restart = matches!(end.outcome.cause, Some(Cause::Rank(_))) && end.outcome.signal.is_none();
        if !may_restart || restarts == most {
            return conclude(end, failure::report);
        }
        if let Some(cause) = end.outcome.cause {
            tell(&failure::report(cause, &end));
        }
        tell(&format!(
            "notice: all ranks are started again (restart {} of {most})\n",
            restarts + 1
        ));
        main_process = MainProcess::choose(arguments.main_process_ip.as_deref(), arguments.main_process_port)?;
    }
    unreachable!("restarts are counted up to their most")
}

/// The place of `ranks` ranks that are alone.
pub(super) fn place(
    ranks: usize,
    main_process: &MainProcess,
    store: Option<RanksStore>,
    run_id: &str,
    restarts: usize,
) -> Place {
    Place {
        run_id: run_id.to_owned(),
        round: restarts,
        restarts,
        machine: 0,
        machines: 1,
        local_ranks: ranks,
        main_address: main_process.address.clone(),
        main_port: main_process.port,
        store,
    }
}

/// Tells how a run ended, by `report` if something stopped it, and returns the launcher's exit code.
///
/// # Errors
/// When all went well but that output was lost.
pub(super) fn conclude(end: RoundEnd, report: impl Fn(Cause, &RoundEnd) -> String) -> Result<ExitCode, CommandError> {
    let Some(cause) = end.outcome.cause else {
        return match end.lost_output {
            None => Ok(ExitCode::SUCCESS),
            Some(error) => Err(error),
        };
    };
    if let Some(error) = &end.lost_output {
        error.report();
    }
    tell(&report(cause, &end));
    Ok(ExitCode::from(end.outcome.exit_code()))
}
