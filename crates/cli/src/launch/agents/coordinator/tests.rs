//! Decisions that take a network and much patience to bring about.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn coordinator(count: &str, max_restarts: usize, now: Instant) -> Coordinator {
    let rules = Rules {
        count: count.parse().unwrap(),
        max_restarts,
        timeout: 100 * SECOND,
        last_call: 10 * SECOND,
        keep_alive: 5 * SECOND,
        terms: vec![("--num_processes".to_owned(), "8".to_owned())],
    };
    Coordinator::new(rules, now)
}

fn hello(id: &str, machine: usize) -> Report {
    Report::Hello(Hello {
        id: id.to_owned(),
        host: format!("node{machine}"),
        pid: 7,
        machine: Some(machine),
        is_host: machine == 0,
        terms: vec![("--num_processes".to_owned(), "8".to_owned())],
    })
}

fn failed(id: &str, round: usize, rank: usize) -> Report {
    Report::Failed {
        id: id.to_owned(),
        round,
        failure: Failure {
            who: format!("rank {rank} (pid 9)"),
            what: "exited with code 3 after 1.0 s".to_owned(),
            code: 3,
        },
    }
}

fn ended(id: &str, round: usize, is_success: bool) -> Report {
    Report::Ended {
        id: id.to_owned(),
        round,
        is_success,
        details: format!("  details of {id}\n"),
    }
}

/// What concerns the whole run.
fn decisions(acts: &[Act]) -> Vec<&Act> {
    let of_run = |act: &&Act| !matches!(act, Act::Leave { .. } | Act::Tell(_));
    acts.iter().filter(of_run).collect()
}

/// The members of the round that is started, and what is announced before.
fn started(acts: &[Act]) -> (Vec<&str>, &str) {
    match decisions(acts)[..] {
        [Act::Start { members, .. }] => (members.iter().map(String::as_str).collect(), ""),
        [Act::Announce(text), Act::Start { members, .. }] => (members.iter().map(String::as_str).collect(), text),
        _ => panic!("no round is started: {acts:?}"),
    }
}

fn end(acts: &[Act]) -> (&str, u8) {
    match decisions(acts)[..] {
        [Act::End(farewell)] => (&farewell.text, farewell.code),
        _ => panic!("the run is not ended: {acts:?}"),
    }
}

/// Brings machines 0, 1, ... with IDs a, b, ... into the first round.
fn first_round(coordinator: &mut Coordinator, machines: usize, now: Instant) {
    let ids = &["a", "b", "c"][..machines];
    let mut acts = Vec::new();
    for (machine, id) in ids.iter().enumerate() {
        acts = coordinator.on_report(hello(id, machine), now);
    }
    assert_eq!(started(&acts), (ids.to_vec(), ""));
}

#[test]
fn numbers_do_not_follow_from_who_came_first() {
    let now = Instant::now();
    let mut coordinator = coordinator("3", 0, now);
    assert_eq!(coordinator.on_report(hello("z", 2), now), []);
    assert_eq!(coordinator.on_report(hello("y", 0), now), []);
    assert_eq!(started(&coordinator.on_report(hello("x", 1), now)).0, ["y", "x", "z"]);
}

#[test]
fn the_first_report_is_the_cause_and_its_machine_gives_the_details() {
    let now = Instant::now();
    let mut coordinator = coordinator("2", 0, now);
    first_round(&mut coordinator, 2, now);
    assert_eq!(coordinator.on_report(failed("b", 0, 5), now), [Act::Stop { round: 0 }]);
    assert_eq!(coordinator.on_report(failed("a", 0, 1), now), []);
    assert_eq!(coordinator.on_report(ended("a", 0, false), now), []);
    let acts = coordinator.on_report(ended("b", 0, false), now);
    let text = "error: rank 5 (pid 9) on machine 1 (host node1) exited with code 3 after 1.0 s\n  details of b\n";
    assert_eq!(end(&acts), (text, 3));
    assert!(!coordinator.is_done(now));
    coordinator.on_report(Report::Gone { id: "a".into() }, now);
    coordinator.on_report(Report::Gone { id: "b".into() }, now);
    assert!(coordinator.is_done(now));
}

#[test]
fn a_machine_that_was_silent_before_ranks_failed_elsewhere_is_the_cause() {
    for (last_beat, cause) in [
        (SECOND, "error: machine 1 (host node1) is gone"),
        (3 * SECOND, "error: rank 0 (pid 9)"),
    ] {
        let now = Instant::now();
        let mut coordinator = coordinator("2", 0, now);
        first_round(&mut coordinator, 2, now);
        coordinator.on_beat("b", now + last_beat);
        coordinator.on_report(failed("a", 0, 0), now + 2 * SECOND);
        coordinator.on_report(ended("a", 0, false), now + 2 * SECOND);
        let acts = coordinator.on_time(now + 9 * SECOND);
        assert!(end(&acts).0.starts_with(cause), "{acts:?}");
    }
}

#[test]
fn restarts_are_counted_for_failures_and_not_for_changes_of_machines() {
    let now = Instant::now();
    let mut coordinator = coordinator("1:2", 1, now);
    coordinator.on_report(hello("a", 0), now);
    assert_eq!(coordinator.on_time(now + 9 * SECOND), []);
    assert_eq!(started(&coordinator.on_time(now + 10 * SECOND)).0, ["a"]);
    // One comes.
    let mut now = now + 10 * SECOND;
    assert_eq!(coordinator.on_report(hello("b", 1), now), [Act::Stop { round: 0 }]);
    let acts = coordinator.on_report(ended("a", 0, false), now);
    assert!(
        started(&acts).1.contains("machine 1 (host node1, launcher 7) has come"),
        "{acts:?}"
    );
    // It fails, which takes the one restart that there is.
    coordinator.on_report(failed("b", 1, 4), now);
    coordinator.on_report(ended("a", 1, false), now);
    let acts = coordinator.on_report(ended("b", 1, false), now);
    assert!(started(&acts).1.contains("(restart 1 of 1)"), "{acts:?}");
    // It is lost, which takes none.
    now += 6 * SECOND;
    let acts = coordinator.on_time(now);
    assert_eq!(decisions(&acts), [&Act::Stop { round: 2 }]);
    assert!(matches!(&acts[0], Act::Leave { id, .. } if id == "b"), "{acts:?}");
    let acts = coordinator.on_report(ended("a", 2, false), now);
    assert!(
        matches!(&acts[..], [Act::Announce(text)] if text.contains("is gone")),
        "{acts:?}"
    );
    now += 10 * SECOND;
    assert_eq!(started(&coordinator.on_time(now)).0, ["a"]);
    coordinator.on_report(failed("a", 3, 0), now);
    assert_eq!(end(&coordinator.on_report(ended("a", 3, false), now)).1, 3);
}

#[test]
fn who_asks_to_stop_ends_the_run_also_while_another_cause_is_dealt_with() {
    let now = Instant::now();
    let mut coordinator = coordinator("2", 5, now);
    first_round(&mut coordinator, 2, now);
    coordinator.on_report(failed("b", 0, 5), now);
    let leaving = Report::Leaving {
        id: "a".into(),
        signal: "SIGINT".into(),
        code: 130,
    };
    coordinator.on_report(leaving, now);
    coordinator.on_report(ended("a", 0, false), now);
    let acts = coordinator.on_report(ended("b", 0, false), now);
    assert_eq!(
        end(&acts),
        ("error: machine 0 (host node0) was stopped by SIGINT\n", 130)
    );
}

#[test]
fn a_launcher_takes_the_place_of_one_that_is_silent_and_of_no_other() {
    let now = Instant::now();
    let mut coordinator = coordinator("3", 0, now);
    coordinator.on_report(hello("a", 0), now);
    coordinator.on_report(hello("b", 1), now);
    assert_eq!(coordinator.on_report(hello("c", 1), now + SECOND), []);
    // A beat that was on its way says nothing, a later one does.
    coordinator.on_beat("b", now + 2 * SECOND);
    assert_eq!(coordinator.on_time(now + 2 * SECOND), []);
    coordinator.on_beat("b", now + 4 * SECOND);
    let acts = coordinator.on_time(now + 4 * SECOND);
    assert!(
        matches!(&acts[1], Act::Leave { id, farewell } if id == "c" && farewell.text.contains("has that number already")),
        "{acts:?}"
    );
    coordinator.on_report(hello("d", 1), now + 5 * SECOND);
    coordinator.on_time(now + 10 * SECOND);
    assert_eq!(coordinator.ids().collect::<Vec<_>>(), ["a", "d"]);
}

#[test]
fn reports_of_a_round_that_is_over_count_for_nothing() {
    let now = Instant::now();
    let mut coordinator = coordinator("2", 1, now);
    first_round(&mut coordinator, 2, now);
    coordinator.on_report(failed("b", 0, 5), now);
    coordinator.on_report(ended("a", 0, false), now);
    started(&coordinator.on_report(ended("b", 0, false), now));
    assert_eq!(coordinator.on_report(failed("a", 0, 1), now), []);
    assert_eq!(coordinator.on_report(ended("a", 0, true), now), []);
    assert_eq!(coordinator.on_report(ended("a", 1, true), now), []);
    assert_eq!(end(&coordinator.on_report(ended("b", 1, true), now)), ("", 0));
}

#[test]
fn a_machine_that_leaves_has_no_part_in_the_next_round_even_if_its_ranks_end_last() {
    let now = Instant::now();
    let mut coordinator = coordinator("1:2", 0, now);
    first_round(&mut coordinator, 2, now);
    let leaving = Report::Leaving {
        id: "b".into(),
        signal: "SIGTERM".into(),
        code: 143,
    };
    coordinator.on_report(leaving, now);
    coordinator.on_report(ended("a", 0, false), now);
    let acts = coordinator.on_report(ended("b", 0, false), now);
    assert!(
        matches!(&acts[..], [Act::Announce(text)] if text.contains("SIGTERM")),
        "{acts:?}"
    );
    let acts = coordinator.on_time(now + 10 * SECOND);
    assert_eq!(started(&acts).0, ["a"]);
}
