//! Rounds on one machine: a failure starts all ranks again, while restarts are left.

use super::*;

#[test]
fn a_failed_rank_restarts_all_ranks_in_a_new_round() {
    let script = "echo $SCONCE_STORE_ADDR $MASTER_PORT > store.$RANK.$TORCHELASTIC_RESTART_COUNT
        echo $$ > pid.$RANK.$TORCHELASTIC_RESTART_COUNT
        if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then exit 4; fi
        [ $TORCHELASTIC_RESTART_COUNT = 0 ] && exec sleep 600
        echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS in $TORCHELASTIC_RUN_ID";
    let mut launch = Launch::new(&["-n", "2", "--max_restarts", "3", "--rdzv_conf", "id=job7"], script);
    let output = launch.output();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        sorted(&output.stdout),
        ["[rank 0] 1 of 3 in job7", "[rank 1] 1 of 3 in job7"]
    );
    let stderr = text(&output.stderr);
    assert!(stderr.starts_with("error: rank 1 (pid "), "{stderr}");
    assert!(
        stderr.contains("notice: all ranks are started again (restart 1 of 3)\n"),
        "{stderr}"
    );
    let stores = [0, 1].map(|round| fs::read_to_string(launch.path(&format!("store.0.{round}"))).unwrap());
    assert_ne!(stores[0], stores[1]);
    assert!(!is_running(number_in(&launch.path("pid.0.0"))));
}

#[test]
fn without_restarts_left_the_failure_ends_the_run() {
    let script = "echo x >> rounds; exit 4";
    let mut launch = Launch::new(&["--max_restarts", "2"], script);
    let output = launch.output();
    assert_eq!(output.status.code(), Some(4), "{output:?}");
    assert_eq!(fs::read_to_string(launch.path("rounds")).unwrap().lines().count(), 3);
}

#[test]
fn who_asks_the_launcher_to_stop_wants_no_other_round() {
    // A rank that fails because of the signal, and one that failed before it.
    for script in [
        "trap 'exit 3' TERM; echo $$ > pid; while :; do sleep 0.05; done",
        "echo $$ > pid; exec sleep 600",
    ] {
        let mut launch = Launch::new(&["--max_restarts", "5"], script);
        let child = launch.spawn();
        number_in(&launch.path("pid"));
        send(Signal::TERM, child.id());
        let output = wait_with_output(child);
        assert_eq!(output.status.code(), Some(143), "{output:?}");
        assert!(!text(&output.stderr).contains("started again"), "{output:?}");
    }
}
