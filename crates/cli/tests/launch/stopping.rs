//! How a run ends: by failure, by signal, by the launcher's own death; and that nothing survives it.

use super::*;

#[test]
fn a_failing_rank_ends_the_run_with_its_code_and_a_report() {
    let script = "if [ $RANK = 1 ]; then seq 1 30 >&2; exit 3; fi; sleep 600";
    let output = Launch::new(&["-n", "3"], script).output();
    assert_eq!(output.status.code(), Some(3));
    let stderr = text(&output.stderr);
    let report = &stderr[stderr.find("error: ").unwrap()..];
    let (first, rest) = report.split_once('\n').unwrap();
    assert!(
        first.starts_with("error: rank 1 (pid ") && first.contains(") exited with code 3 after "),
        "{report}"
    );
    let last_lines = String::from_iter((11..=30).map(|number| format!("    {number}\n")));
    assert_eq!(
        rest,
        format!("  the end of its stderr:\n{last_lines}  ended as a consequence: ranks 0, 2 (SIGTERM)\n")
    );
}

#[test]
fn a_killed_rank_is_the_cause_and_the_others_end_within_two_seconds() {
    let script = "echo $$ > new.$RANK; mv new.$RANK pid.$RANK; exec sleep 600";
    let mut launch = Launch::new(&["-n", "3"], script);
    let child = launch.spawn();
    let pids = [0, 1, 2].map(|rank| number_in(&launch.path(&format!("pid.{rank}"))));
    let started = Instant::now();
    send(Signal::KILL, pids[2]);
    let output = wait_with_output(child);
    let taken = started.elapsed();
    assert!(taken < Duration::from_secs(2), "{taken:?}");
    assert_eq!(output.status.code(), Some(137));
    let stderr = text(&output.stderr);
    let cause = format!("error: rank 2 (pid {}) killed by signal 9 (SIGKILL) after ", pids[2]);
    assert!(stderr.starts_with(&cause), "{stderr}");
    assert!(
        stderr.contains("ended as a consequence: ranks 0, 1 (SIGTERM)\n"),
        "{stderr}"
    );
    assert!(pids.iter().all(|pid| !is_running(*pid)));
}

#[test]
fn a_rank_may_end_well_before_the_others() {
    let script = "[ $RANK = 0 ] && { echo $$ > new; mv new ended; exit 0; }
        while [ ! -e ended ] || [ -e /proc/$(cat ended)/cmdline -a ! -e seen ]; do
            grep -q '^State:.Z' /proc/$(cat ended)/status && touch seen
        done 2>/dev/null
        echo still here";
    let output = Launch::new(&["-n", "2"], script).output();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stdout), "[rank 1] still here\n");
}

#[test]
fn ranks_that_ignore_sigterm_are_killed_after_the_grace() {
    let script = "trap '' TERM; touch ready.$RANK; while [ $RANK = 0 ]; do sleep 600; done
        while [ ! -e ready.0 ]; do :; done; exit 5";
    let started = Instant::now();
    let output = Launch::new(&["-n", "2", "--kill_grace", "0.2"], script).output();
    assert!(started.elapsed() < DEADLINE);
    assert_eq!(output.status.code(), Some(5));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("did not end when asked, and killed: rank 0\n"),
        "{stderr}"
    );
}

#[test]
fn sigterm_reaches_every_rank_and_nothing_survives() {
    // Each rank has a child of its own, which the signal must reach too.
    let script = "trap 'echo $RANK > told.$RANK; exit 0' TERM
        sleep 600 & echo $! > helper.$RANK; echo $$ > pid.$RANK; wait";
    let mut launch = Launch::new(&["-n", "3"], script);
    let child = launch.spawn();
    let pids = ["pid.0", "pid.1", "pid.2", "helper.0", "helper.1", "helper.2"];
    let pids = pids.map(|name| number_in(&launch.path(name)));
    send(Signal::TERM, child.id());
    let output = wait_with_output(child);
    assert_eq!(output.status.code(), Some(143));
    assert!(
        text(&output.stderr).contains("error: stopped by SIGTERM\n"),
        "{output:?}"
    );
    for rank in 0..3 {
        assert_eq!(number_in(&launch.path(&format!("told.{rank}"))), rank);
    }
    for pid in pids {
        wait_until("all processes are gone", || !is_running(pid));
    }
}

#[test]
fn a_second_interrupt_kills_at_once() {
    // A shell that waits may look for signals only when that for which it waits has ended.
    let script = "trap 'echo $RANK > told.$RANK' INT; echo $$ > pid.$RANK; while :; do sleep 0.1; done";
    let mut launch = Launch::new(&["-n", "2", "--kill_grace", "100000"], script);
    let child = launch.spawn();
    let pids = ["pid.0", "pid.1"].map(|name| number_in(&launch.path(name)));
    send(Signal::INT, child.id());
    assert_eq!(["told.0", "told.1"].map(|name| number_in(&launch.path(name))), [0, 1]);
    assert!(pids.iter().all(|pid| is_running(*pid)));
    send(Signal::INT, child.id());
    let output = wait_with_output(child);
    assert_eq!(output.status.code(), Some(130));
    assert!(pids.iter().all(|pid| !is_running(*pid)));
}

#[test]
fn a_killed_launcher_leaves_no_rank_behind() {
    for ranks in ["1", "3"] {
        let mut launch = Launch::new(&["-n", ranks], "echo $$ > pid.$RANK; exec sleep 600");
        let mut child = launch.spawn();
        let pids = Vec::from_iter(
            (0..ranks.parse().unwrap()).map(|rank: u32| number_in(&launch.path(&format!("pid.{rank}")))),
        );
        child.kill().unwrap();
        child.wait().unwrap();
        for pid in pids {
            wait_until("the rank is gone", || !is_running(pid));
        }
    }
}

#[test]
fn what_a_rank_leaves_running_ends_with_the_run() {
    // The helper keeps the rank's stdout open: the launcher must not wait for it.
    let mut launch = Launch::new(&["-n", "2"], "sleep 600 & echo $! > helper.$RANK; echo done");
    let output = wait_with_output(launch.spawn());
    assert!(output.status.success(), "{output:?}");
    assert_eq!(sorted(&output.stdout), ["[rank 0] done", "[rank 1] done"]);
    for rank in 0..2 {
        let helper = number_in(&launch.path(&format!("helper.{rank}")));
        wait_until("the helper is gone", || !is_running(helper));
    }
}

#[test]
fn nohup_survives_a_hangup() {
    let script = "echo $PPID > launcher; while [ ! -e end ]; do sleep 0.01; done; echo finished";
    let launch = Launch::new(&["-n", "2"], script);
    let mut command = Command::new("/bin/sh");
    command.args([
        "-c",
        "trap '' HUP; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_sconce"),
        "launch",
        "-n",
        "2",
    ]);
    command
        .arg("/bin/sh")
        .arg(launch.path("program"))
        .current_dir(&launch.folder)
        .stdout(Stdio::piped());
    let child = command.spawn().unwrap();
    assert_eq!(number_in(&launch.path("launcher")), child.id());
    send(Signal::HUP, child.id());
    fs::write(launch.path("end"), "").unwrap();
    let output = wait_with_output(child);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(sorted(&output.stdout), ["[rank 0] finished", "[rank 1] finished"]);
}

#[test]
fn a_paused_launcher_pauses_its_ranks() {
    let mut launch = Launch::new(&["-n", "2"], "echo $$ > pid.$RANK; exec sleep 600");
    let child = launch.spawn();
    let pids = ["pid.0", "pid.1"].map(|name| number_in(&launch.path(name)));
    let all = [child.id(), pids[0], pids[1]];
    send(Signal::TSTP, child.id());
    wait_until("all are paused", || all.iter().all(|pid| state(*pid) == Some('T')));
    send(Signal::CONT, child.id());
    wait_until("all go on", || {
        all.iter().all(|pid| is_running(*pid) && state(*pid) != Some('T'))
    });
    send(Signal::TERM, child.id());
    assert_eq!(wait_with_output(child).status.code(), Some(143));
}
