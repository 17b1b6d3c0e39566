//! Tells, as the last thing on stderr, what stopped a run.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use rustix::process::Signal;
use signal_hook::low_level::signal_name;

use super::output::LastLines;
use super::rank_process::End;
use super::rank_tags::Writer;
use super::round::RoundEnd;
use super::supervise::{Cause, Outcome, RankEnd};

/// Where `mpirun` (Open MPI's) names the rank that failed: what stands before its number, and after.
const BLAME: [(&str, &str); 3] = [
    ("Process name: [[", "]"),
    ("process rank ", " with PID"),
    ("MPI_ABORT was invoked on rank ", " in communicator"),
];

/// What ranks say whose failure another one tells ([`sconce_core::Error::ReportedByMain`]).
const ELSEWHERE: &str = "rank 0 has the message";

/// The report on a round that was stopped by `cause`.
pub(super) fn report(cause: Cause, round: &RoundEnd) -> String {
    let outcome = &round.outcome;
    let number = |local_rank| round.first_rank + local_rank;
    let mut report = match cause {
        Cause::Rank(local_rank) => {
            let end = outcome.ends[local_rank];
            let mut report = format!(
                "error: rank {} (pid {}) {} {}\n",
                number(local_rank),
                round.pids[local_rank],
                end.end,
                after(end.after)
            );
            let own_lines = round.last_lines.get(&Some(number(local_rank)));
            let has_said = |error: &str| {
                let first = error.lines().next().unwrap_or_default();
                own_lines.is_some_and(|lines| lines.iter().any(|line| line.contains(first)))
            };
            if let Some(error) = round.errors.get(&local_rank).filter(|error| !has_said(error)) {
                let _ = writeln!(report, "  its error: {}", error.replace('\n', "\n    "));
            }
            // Of ranks that failed together the first to end need not be the one that says why.
            let failed = (0..outcome.ends.len()).filter(|other| !outcome.ends[*other].end.is_success());
            report += &end_of_stderr(number(local_rank), failed.map(number), &round.last_lines);
            report
        }
        Cause::Signal(signal) => format!("error: stopped by {}\n", name(signal.as_raw())),
        Cause::Elsewhere => String::new(),
    };
    if let Some(line) = consequences(outcome, round.first_rank) {
        let _ = writeln!(report, "  {line}");
    }
    if let Some(line) = killed(outcome, round.first_rank) {
        let _ = writeln!(report, "  {line}");
    }
    if let Cause::Rank(rank) = cause
        && let Some(hint) = hint(outcome.ends[rank].end)
    {
        let _ = writeln!(report, "hint: {hint}");
    }
    report
}

/// The report on a job of `mpirun`'s, the only process that was watched.
pub(super) fn report_job(cause: Cause, round: &RoundEnd) -> String {
    let RoundEnd {
        outcome, last_lines, ..
    } = round;
    let mpirun = outcome.ends[0];
    if let Cause::Signal(signal) = cause {
        let killed = if mpirun.was_killed {
            "  mpirun did not end when asked, and was killed\n"
        } else {
            ""
        };
        return format!("error: stopped by {}\n{killed}", name(signal.as_raw()));
    }
    let end = format!("mpirun {} {}", mpirun.end, after(mpirun.after));
    let talkers = last_lines.keys().flatten().copied();
    match last_lines.get(&None).and_then(blamed) {
        Some(rank) => {
            let told = end_of_stderr(rank, talkers, last_lines);
            format!("error: {end}; the first rank that it saw fail is rank {rank}\n{told}")
        }
        None => format!("error: {end}; what it and the ranks have said is above\n"),
    }
}

/// The rank that `mpirun` names.
fn blamed(own_lines: &LastLines) -> Option<usize> {
    own_lines.iter().find_map(|line| {
        BLAME.iter().find_map(|(before, after)| {
            let rest = line.split_once(before)?.1;
            // Open MPI's name of a process is [[job,part],rank].
            let number = rest.split_once(after)?;
            let number = if before.ends_with('[') { number.1 } else { number.0 };
            let number = number.trim_start_matches(',').split(']').next()?;
            number.trim().parse().ok()
        })
    })
}

/// The end of what `rank`, or else the first of `others` that has said something, has written to stderr.
fn end_of_stderr(rank: usize, others: impl Iterator<Item = usize>, last_lines: &BTreeMap<Writer, LastLines>) -> String {
    let said = |rank| last_lines.get(&Some(rank)).map(|lines| (rank, lines));
    let tellers = std::iter::once(rank).chain(others).filter_map(said);
    let tellers = tellers.filter(|(_, lines)| lines.iter().len() > 0);
    // The first of those that say the cause, else the first of those that leave that to another.
    let leaves_it = |(_, lines): &(usize, &LastLines)| lines.iter().any(|line| line.contains(ELSEWHERE));
    let Some((teller, lines)) = tellers.min_by_key(leaves_it) else {
        return String::new();
    };
    let whose = if teller == rank {
        "its".to_owned()
    } else {
        format!("rank {teller}'s")
    };
    let mut told = format!("  the end of {whose} stderr:\n");
    for line in lines.iter() {
        let _ = writeln!(told, "    {line}");
    }
    told
}

/// One line on the ranks that ended after the cause and because of it, those with the same end together.
fn consequences(outcome: &Outcome, first_rank: usize) -> Option<String> {
    let mut by_end: Vec<(End, Vec<usize>)> = Vec::new();
    for (rank, RankEnd { end, .. }) in outcome.ends.iter().enumerate().filter(|(_, end)| end.is_consequence) {
        match by_end.iter_mut().find(|(of, _)| of == end) {
            Some((_, ranks)) => ranks.push(first_rank + rank),
            None => by_end.push((*end, vec![first_rank + rank])),
        }
    }
    let told = by_end.iter().map(|(end, ranks)| match end {
        End::Code(code) => format!("{} (code {code})", list(ranks)),
        End::Signal(signal) => format!("{} ({})", list(ranks), name(*signal)),
    });
    let told = Vec::from_iter(told);
    if told.is_empty() {
        None
    } else {
        Some(format!("ended as a consequence: {}", told.join(", ")))
    }
}

/// One line on the ranks that did not end by themselves in the grace.
fn killed(outcome: &Outcome, first_rank: usize) -> Option<String> {
    let ranks = outcome.ends.iter().enumerate().filter(|(_, end)| end.was_killed);
    let ranks = Vec::from_iter(ranks.map(|(rank, _)| first_rank + rank));
    if ranks.is_empty() {
        None
    } else {
        Some(format!("did not end when asked, and killed: {}", list(&ranks)))
    }
}

fn list(ranks: &[usize]) -> String {
    let numbers = Vec::from_iter(ranks.iter().map(usize::to_string));
    format!(
        "{} {}",
        if ranks.len() == 1 { "rank" } else { "ranks" },
        numbers.join(", ")
    )
}

/// What usually sends a signal that says little by itself.
fn hint(end: End) -> Option<&'static str> {
    match end {
        End::Signal(signal) if signal == Signal::KILL.as_raw() => {
            Some("the kernel sends SIGKILL when memory runs out: `dmesg` then names the process")
        }
        End::Signal(signal) if signal == Signal::BUS.as_raw() => {
            Some("SIGBUS often means that /dev/shm, or the disk under a mapped file, is full: see `df -h /dev/shm`")
        }
        End::Code(_) | End::Signal(_) => None,
    }
}

pub(super) fn name(signal: i32) -> String {
    signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_owned)
}

pub(super) fn after(duration: Duration) -> String {
    match duration.as_secs() {
        0..60 => format!("after {:.1} s", duration.as_secs_f64()),
        seconds => format!(
            "after {} h {:02} min {:02} s",
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank_end(end: End, is_consequence: bool, was_killed: bool) -> RankEnd {
        RankEnd {
            end,
            after: Duration::from_millis(1_234),
            is_consequence,
            was_killed,
        }
    }

    fn round(outcome: Outcome, first_rank: usize) -> RoundEnd {
        RoundEnd {
            pids: (10..).take(outcome.ends.len()).collect(),
            outcome,
            first_rank,
            last_lines: BTreeMap::new(),
            errors: BTreeMap::new(),
            lost_output: None,
        }
    }

    #[test]
    fn ranks_of_another_machine_than_the_first_are_told_by_their_numbers_in_the_world() {
        let cause = Cause::Rank(1);
        let outcome = Outcome {
            cause: Some(cause),
            signal: None,
            ends: vec![
                rank_end(End::Code(1), true, false),
                rank_end(End::Code(3), false, false),
            ],
        };
        let mut round = round(outcome, 4);
        round.errors.insert(1, "ValueError: no data\nat all".to_owned());
        assert_eq!(
            report(cause, &round),
            "error: rank 5 (pid 11) exited with code 3 after 1.2 s\n  its error: ValueError: no data\n    at all\n  \
             ended as a consequence: rank 4 (code 1)\n"
        );
    }

    #[test]
    fn a_failed_rank_is_told_first_and_its_consequences_in_one_line() {
        let cause = Cause::Rank(1);
        let ends = vec![
            rank_end(End::Signal(15), true, false),
            rank_end(End::Code(3), false, false),
            rank_end(End::Code(0), false, false),
            rank_end(End::Code(1), true, false),
            rank_end(End::Signal(15), true, false),
        ];
        let outcome = Outcome {
            cause: Some(cause),
            signal: None,
            ends,
        };
        assert_eq!(
            report(cause, &round(outcome.clone(), 0)),
            "error: rank 1 (pid 11) exited with code 3 after 1.2 s\n  \
             ended as a consequence: ranks 0, 4 (SIGTERM), rank 3 (code 1)\n"
        );
        assert_eq!(outcome.exit_code(), 3);
    }

    #[test]
    fn a_stop_signal_is_told_with_the_ranks_that_did_not_heed_it() {
        let cause = Cause::Signal(Signal::INT);
        let ends = vec![
            rank_end(End::Signal(9), true, true),
            rank_end(End::Code(0), true, false),
        ];
        let outcome = Outcome {
            cause: Some(cause),
            signal: None,
            ends,
        };
        assert_eq!(
            report(cause, &round(outcome.clone(), 0)),
            "error: stopped by SIGINT\n  ended as a consequence: rank 0 (SIGKILL), rank 1 (code 0)\n  \
             did not end when asked, and killed: rank 0\n"
        );
        assert_eq!(outcome.exit_code(), 130);
    }

    fn job_report(own_lines: &[&str], code: i32) -> String {
        let keep = |lines: &[&str]| {
            let mut kept = LastLines::default();
            lines.iter().for_each(|line| kept.keep(line.as_bytes()));
            kept
        };
        let cause = Cause::Rank(0);
        let outcome = Outcome {
            cause: Some(cause),
            signal: None,
            ends: vec![rank_end(End::Code(code), false, false)],
        };
        let mut round = round(outcome, 0);
        round.last_lines = BTreeMap::from([
            (None, keep(own_lines)),
            (Some(0), keep(&["rank 12 left"])),
            (Some(12), keep(&["no such file"])),
        ]);
        report_job(cause, &round)
    }

    #[test]
    fn the_rank_that_mpirun_names_is_told_with_its_last_lines() {
        // What Open MPI 4.1.4 writes after a rank exits, is killed, or calls MPI_Abort.
        for line in [
            "  Process name: [[28959,1],12]",
            "mpirun noticed that process rank 12 with PID 0 on node a exited on signal 9 (Killed).",
            "MPI_ABORT was invoked on rank 12 in communicator MPI COMMUNICATOR 3 DUP FROM 0",
        ] {
            let expected = "error: mpirun exited with code 3 after 1.2 s; the first rank that it saw fail is rank 12\n  \
                            the end of its stderr:\n    no such file\n";
            assert_eq!(job_report(&["mpirun detected that", line], 3), expected);
        }
        let expected = "error: mpirun exited with code 1 after 1.2 s; what it and the ranks have said is above\n";
        assert_eq!(job_report(&["There are not enough slots available"], 1), expected);
    }

    #[test]
    fn what_ranks_say_whose_failure_another_one_tells_is_known() {
        let said = sconce_core::Error::ReportedByMain.to_string();
        assert!(said.contains(ELSEWHERE), "{said}");
    }

    #[test]
    fn long_runs_are_told_in_hours() {
        assert_eq!(after(Duration::from_secs(3 * 3600 + 62)), "after 3 h 01 min 02 s");
    }
}
