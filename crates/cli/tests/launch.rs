//! `sconce launch` as its users see it: the real binary, with shell scripts for ranks.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Longer than anything here takes on a loaded machine: a test that waits this long has failed.
const DEADLINE: Duration = Duration::from_secs(60);

/// A folder with a script, and the launcher's command line so far.
struct Launch {
    folder: TempDir,
    command: Command,
}

impl Launch {
    /// Prepares `sconce launch FLAGS... SCRIPT`, where the script's text is `script`, run by /bin/sh in a folder of its own.
    fn new(flags: &[&str], script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = launcher();
        command.args(flags).arg(program).current_dir(&folder);
        Self { folder, command }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn output(&mut self) -> Output {
        self.command.output().unwrap()
    }

    fn spawn(&mut self) -> Child {
        self.command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }
}

/// `sconce launch`, without what the test's own surroundings may have set.
fn launcher() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command
        .arg("launch")
        .env_remove("RAYON_NUM_THREADS")
        .env_remove("OMP_NUM_THREADS");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The lines in sorted order: ranks write in any order.
fn sorted(bytes: &[u8]) -> Vec<String> {
    let mut lines = Vec::from_iter(text(bytes).lines().map(str::to_owned));
    lines.sort();
    lines
}

/// Waits until `condition` holds.
fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < DEADLINE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits for the number, with a line end, that a script writes to a file.
fn number_in(file: &Path) -> u32 {
    let mut content = String::new();
    wait_until(&format!("{} is written", file.display()), || {
        content = fs::read_to_string(file).unwrap_or_default();
        content.ends_with('\n')
    });
    content.trim().parse().unwrap()
}

/// Whether the process is there and not only waiting to be reaped by whoever inherited it.
fn is_running(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    let state = stat.rsplit(") ").next().and_then(|rest| rest.chars().next());
    !matches!(state, Some('Z' | 'X'))
}

fn send(signal: Signal, pid: u32) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

fn wait_with_output(child: Child) -> Output {
    let pid = child.id();
    let (done, finished) = std::sync::mpsc::channel();
    let waiter = std::thread::spawn(move || {
        let output = child.wait_with_output().unwrap();
        let _ = done.send(());
        output
    });
    if finished.recv_timeout(DEADLINE).is_err() {
        send(Signal::KILL, pid);
        panic!("the launcher does not end");
    }
    waiter.join().unwrap()
}

#[test]
fn every_rank_gets_its_whole_place_in_the_world() {
    let mut launch = Launch::new(&["-n", "3", "--cpu"], "env > env.$RANK");
    // What another launcher around this one would have left, and what a rank must not see.
    launch.command.envs([
        ("RANK", "9"),
        ("OMPI_COMM_WORLD_RANK", "9"),
        ("PMI_SIZE", "9"),
        ("PMIX_RANK", "9"),
    ]);
    launch.command.env_remove("ACCELERATE_MIXED_PRECISION");
    let output = launch.output();
    assert!(output.status.success(), "{output:?}");

    let mut ports = Vec::new();
    for rank in 0..3 {
        let content = fs::read_to_string(launch.path(&format!("env.{rank}"))).unwrap();
        let variables: BTreeMap<_, _> = content.lines().filter_map(|line| line.split_once('=')).collect();
        let own = rank.to_string();
        // The variables of torchrun on one host (torch/distributed/elastic) and of `accelerate launch --cpu`.
        let expected = [
            ("RANK", own.as_str()),
            ("LOCAL_RANK", &own),
            ("ROLE_RANK", &own),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("ROLE_WORLD_SIZE", "3"),
            ("ROLE_NAME", "default"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("NODE_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("ACCELERATE_USE_CPU", "True"),
        ];
        for (name, value) in expected {
            assert_eq!(variables.get(name), Some(&value), "{name} of rank {rank}");
        }
        for name in [
            "OMPI_COMM_WORLD_RANK",
            "PMI_SIZE",
            "PMIX_RANK",
            "ACCELERATE_MIXED_PRECISION",
        ] {
            assert_eq!(variables.get(name), None, "{name} of rank {rank}");
        }
        ports.push(variables["MASTER_PORT"].parse::<u16>().unwrap());
    }
    assert!(ports[0] != 0 && ports.iter().all(|port| *port == ports[0]), "{ports:?}");
}

#[test]
fn flags_reach_the_ranks_as_accelerates_variables() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
        .to_string();
    let flags = [
        "--num_processes=1",
        "--mixed-precision",
        "bf16",
        "--gradient_accumulation_steps",
        "4",
        "--debug",
        "--num_cpu_threads_per_process",
        "3",
        "--main_process_port",
        &port,
        "--main_process_ip",
        "127.0.0.1",
    ];
    let names = "$ACCELERATE_MIXED_PRECISION $ACCELERATE_GRADIENT_ACCUMULATION_STEPS $ACCELERATE_DEBUG_MODE \
                 $RAYON_NUM_THREADS $OMP_NUM_THREADS $MASTER_PORT ${ACCELERATE_USE_CPU-unset}";
    let output = Launch::new(&flags, &format!("echo {names}")).output();
    assert_eq!(text(&output.stdout), format!("bf16 4 true 3 3 {port} unset\n"));
}

#[test]
fn cores_are_divided_among_ranks_unless_the_user_has_set_the_threads() {
    let script = "echo $RAYON_NUM_THREADS $OMP_NUM_THREADS";
    let cores = std::thread::available_parallelism().unwrap().get();
    for ranks in [1, 2, cores + 1] {
        let output = Launch::new(&["--no_prefix", "-n", &ranks.to_string()], script).output();
        let threads = if ranks > cores { 1 } else { cores / ranks };
        assert_eq!(text(&output.stdout), format!("{threads} {threads}\n").repeat(ranks));
    }

    let mut launch = Launch::new(&["-n", "2"], script);
    launch.command.env("RAYON_NUM_THREADS", "7");
    let others = (cores / 2).max(1);
    let expected = [format!("[rank 0] 7 {others}"), format!("[rank 1] 7 {others}")];
    assert_eq!(sorted(&launch.output().stdout), expected);
}

#[test]
fn lines_stay_whole_and_carry_their_rank_under_heavy_output() {
    // Each rank writes 3000 lines to each stream, in pieces, both streams into one pipe.
    let script = r#"
        line() { printf '%s %s' "$1 $RANK" "$2"; printf ' abcdefghijklmnopqrstuvwxyz%s\n' " $2"; }
        i=0; while [ $i -lt 3000 ]; do line out $i; line err $i >&2; i=$((i + 1)); done"#;
    let mut launch = Launch::new(&["-n", "4"], script);
    let (mut reader, writer) = std::io::pipe().unwrap();
    launch.command.stdout(writer.try_clone().unwrap()).stderr(writer);
    let child = launch.command.spawn().unwrap();
    drop(launch.command); // It holds the writing end too.
    let mut all = String::new();
    reader.read_to_string(&mut all).unwrap();
    assert!(wait_with_output(child).status.success());

    let mut next = BTreeMap::new();
    for line in all.lines() {
        let words = Vec::from_iter(line.split(' '));
        let &[
            "[rank",
            prefix,
            stream,
            rank,
            number,
            "abcdefghijklmnopqrstuvwxyz",
            again,
        ] = words.as_slice()
        else {
            panic!("torn line: {line}");
        };
        assert_eq!((prefix, number), (format!("{rank}]").as_str(), again), "{line}");
        let expected = next.entry((stream, rank)).or_insert(0);
        assert_eq!(number, expected.to_string(), "order of {stream} of rank {rank}");
        *expected += 1;
    }
    assert_eq!(next.len(), 8);
    assert!(next.values().all(|count| *count == 3000), "{next:?}");
}

#[test]
fn each_stream_goes_to_its_own() {
    let output = Launch::new(&["-n", "2"], "echo out; echo err >&2").output();
    assert_eq!(sorted(&output.stdout), ["[rank 0] out", "[rank 1] out"]);
    assert_eq!(sorted(&output.stderr), ["[rank 0] err", "[rank 1] err"]);
}

#[test]
fn a_last_line_without_an_end_is_shown_as_a_line() {
    let output = Launch::new(&["-n", "2"], "printf 'first\nlast'").output();
    assert_eq!(
        sorted(&output.stdout),
        ["[rank 0] first", "[rank 0] last", "[rank 1] first", "[rank 1] last"]
    );
}

#[test]
fn a_line_of_a_mebibyte_stays_one_line() {
    let output = Launch::new(&["-n", "2"], "head -c 1048576 /dev/zero | tr '\\0' x; echo").output();
    let long = "x".repeat(1 << 20);
    assert_eq!(
        sorted(&output.stdout),
        [format!("[rank 0] {long}"), format!("[rank 1] {long}")]
    );
}

#[test]
fn binary_output_passes_through() {
    let output = Launch::new(&["-n", "2"], r"[ $RANK = 1 ] || printf '\377\000\376\n'").output();
    assert_eq!(output.stdout, b"[rank 0] \xff\x00\xfe\n");
}

#[test]
fn a_single_rank_keeps_the_launchers_input_and_output() {
    let mut launch = Launch::new(&[], "cat; printf end");
    let mut child = launch
        .command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"input\n").unwrap();
    assert_eq!(text(&wait_with_output(child).stdout), "input\nend");
}

#[test]
fn several_ranks_find_their_input_empty() {
    let mut launch = Launch::new(&["-n", "2"], "cat; echo end");
    launch.command.stdin(Stdio::piped());
    let child = launch.command.stdout(Stdio::piped()).spawn().unwrap();
    assert_eq!(
        sorted(&wait_with_output(child).stdout),
        ["[rank 0] end", "[rank 1] end"]
    );
}

#[test]
fn arguments_reach_the_program_unchanged() {
    let mut launch = Launch::new(&["-n", "1"], r#"for argument; do printf '%s\n' "<$argument>"; done"#);
    launch
        .command
        .args(["a b", "--num_processes", "5", "-x", "--", "", "*", "$HOME", "--help"]);
    let expected = "<a b>\n<--num_processes>\n<5>\n<-x>\n<-->\n<>\n<*>\n<$HOME>\n<--help>\n";
    assert_eq!(text(&launch.output().stdout), expected);
}

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
    let script = "trap 'echo $RANK > told.$RANK' INT; echo $$ > pid.$RANK; while :; do sleep 600 & wait; done";
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
fn a_reader_that_leaves_ends_the_run_as_in_any_pipeline() {
    let mut launch = Launch::new(&["-n", "2"], "while :; do echo line; done");
    let mut child = launch.spawn();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut first)
        .unwrap();
    let output = wait_with_output(child);
    assert!(first.ends_with("] line\n"), "{first}");
    assert_eq!(output.status.code(), Some(141), "{output:?}"); // 128 + SIGPIPE
    assert!(!text(&output.stderr).contains("panicked"), "{output:?}");
}

#[test]
fn a_missing_program_is_one_error_before_anything_starts() {
    let output = launcher().args(["-n", "3", "./no-such-program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let stderr = text(&output.stderr);
    assert!(
        stderr.starts_with("error: there is no program at ./no-such-program\nhint: "),
        "{stderr}"
    );
    assert_eq!(stderr.matches("no-such-program").count(), 1, "{stderr}");

    let output = launcher().arg("no-such-program").output().unwrap();
    assert!(
        text(&output.stderr).starts_with("error: no program no-such-program in PATH\nhint: "),
        "{output:?}"
    );
}

#[test]
fn a_file_that_is_no_program_is_refused() {
    let mut launch = Launch::new(&[], "echo started");
    fs::set_permissions(launch.path("program"), fs::Permissions::from_mode(0o644)).unwrap();
    let output = launch.output();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("program may not be executed\nhint: "),
        "{output:?}"
    );
}

#[test]
fn zero_processes_and_unknown_flags_are_usage_errors() {
    for (flags, message) in [
        (vec!["--num_processes", "0", "true"], "at least 1 is needed"),
        (vec!["--num_proceses", "2", "true"], "--num_proceses"),
        (vec!["--mixed_precision", "int3", "true"], "int3"),
        (vec![], "nothing to launch"),
    ] {
        let output = launcher().args(&flags).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        let stderr = text(&output.stderr);
        assert!(
            stderr.starts_with("error: ") && stderr.contains(message),
            "{flags:?}: {stderr}"
        );
    }
}

#[test]
fn an_example_is_built_once_and_started_per_rank() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &str| {
        let file = folder.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, content).unwrap();
    };
    write(
        "Cargo.toml",
        "[package]\nname = \"story\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[workspace]\n",
    );
    write("src/lib.rs", "");
    write(
        "examples/teller.rs",
        r#"fn main() { println!("{:?}", std::env::args().skip(1).collect::<Vec<_>>()); }"#,
    );

    let launch = |words: &[&str]| {
        let mut command = launcher();
        command
            .args(["-n", "2", "--profile", "dev"])
            .args(words)
            .current_dir(&folder)
            .env_remove("CARGO_TARGET_DIR");
        command.output().unwrap()
    };
    let output = launch(&["--example", "teller", "--", "--lr", "1e-3"]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(
        sorted(&output.stdout),
        [0, 1].map(|rank| format!("[rank {rank}] [\"--lr\", \"1e-3\"]"))
    );
    assert_eq!(text(&output.stderr).matches("Compiling story").count(), 1);

    let output = launch(&["--example", "tellr"]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("teller") && stderr.contains("error: cargo could not build example tellr"),
        "{stderr}"
    );
}
