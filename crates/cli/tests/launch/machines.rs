//! Launchers of several machines, which are processes of this one: they meet at a port of loopback.

use std::os::unix::process::ExitStatusExt;

use super::*;

/// A port at which nobody listens; it may be taken by another before it is used, as any that is asked for.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Launchers that meet, each of which runs the same script in a folder that they have in common.
struct Machines {
    folder: TempDir,
    port: u16,
    flags: Vec<String>,
}

impl Machines {
    /// Prepares launchers with `flags`; each rank runs `script`.
    fn new(flags: &[&str], script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("program"), script).unwrap();
        Self {
            folder,
            port: free_port(),
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
        }
    }

    /// The command of one launcher, with flags of its own.
    fn command(&self, own: &[&str]) -> Command {
        let mut command = launcher();
        command
            .args(&self.flags)
            .args(own)
            .args(["--main_process_ip", "127.0.0.1", "--main_process_port"])
            .arg(self.port.to_string())
            .args(["/bin/sh", "program"])
            .current_dir(&self.folder)
            .env_remove("SCONCE_STORE_SECRET")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn start(&self, machine: usize) -> Child {
        self.command(&["--machine_rank", &machine.to_string()]).spawn().unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The variables that a rank has written to `env.RANK.ROUND`.
    fn variables(&self, name: &str) -> BTreeMap<String, String> {
        let content = fs::read_to_string(self.path(name)).unwrap();
        let pairs = content.lines().filter_map(|line| line.split_once('='));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }
}

/// Has the shell write `pid.RANK.ROUND` and stay.
const STAY: &str = "echo $$ > new.$RANK; mv new.$RANK pid.$RANK.$TORCHELASTIC_RESTART_COUNT; exec sleep 600";

#[test]
fn ranks_of_two_machines_have_torchruns_places() {
    let machines = Machines::new(
        &["--num_machines", "2", "-n", "4", "--role", "trainer", "--cpu"],
        "env > env.$RANK; echo line",
    );
    let children = [0, 1].map(|machine| machines.start(machine));
    let outputs = children.map(wait_with_output);
    for (machine, output) in outputs.iter().enumerate() {
        assert!(output.status.success(), "{output:?}");
        let expected = [0, 1].map(|local| format!("[rank {}] line", 2 * machine + local));
        assert_eq!(sorted(&output.stdout), expected);
    }
    let mut ports = Vec::new();
    for rank in 0..4 {
        let variables = machines.variables(&format!("env.{rank}"));
        let (own, local, machine) = (rank.to_string(), (rank % 2).to_string(), (rank / 2).to_string());
        for (name, value) in [
            ("RANK", own.as_str()),
            ("LOCAL_RANK", &local),
            ("ROLE_RANK", &own),
            ("ROLE_NAME", "trainer"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("GROUP_RANK", &machine),
            ("GROUP_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("TORCHELASTIC_USE_AGENT_STORE", "False"),
        ] {
            assert_eq!(
                variables.get(name).map(String::as_str),
                Some(value),
                "{name} of rank {rank}"
            );
        }
        let world = World::from_lookup(|name| variables.get(name).cloned()).unwrap();
        assert_eq!(
            (world.rank, world.node_rank, world.local_rank),
            (rank, rank / 2, rank % 2)
        );
        ports.push((
            variables["MASTER_PORT"].clone(),
            variables["SCONCE_STORE_ADDR"].clone(),
            variables["TORCHELASTIC_RUN_ID"].clone(),
        ));
    }
    assert!(ports.iter().all(|of_rank| *of_rank == ports[0]), "{ports:?}");
}

#[test]
fn ranks_of_two_machines_meet_at_their_store() {
    let machines = Machines::new(
        &["--num_machines", "2", "-n", "2"],
        "env > new.$RANK; mv new.$RANK env.$RANK; exec sleep 600",
    );
    let children = [0, 1].map(|machine| machines.start(machine));
    wait_until("the ranks run", || {
        [0, 1].iter().all(|rank| machines.path(&format!("env.{rank}")).exists())
    });
    let clients = [0, 1].map(|rank| {
        let variables = machines.variables(&format!("env.{rank}"));
        let secret = Secret::from_text(&variables["SCONCE_STORE_SECRET"]).unwrap();
        StoreClient::connect(&variables["SCONCE_STORE_ADDR"], &secret, DEADLINE).unwrap()
    });
    clients[0].set("key", b"value").unwrap();
    assert_eq!(clients[1].get("key").unwrap().as_deref(), Some(&b"value"[..]));
    send(Signal::TERM, children[1].id());
    for output in children.map(wait_with_output) {
        assert_eq!(output.status.code(), Some(143), "{output:?}");
        assert!(text(&output.stderr).contains("was stopped by SIGTERM"), "{output:?}");
    }
}

#[test]
fn a_failed_rank_ends_all_machines_with_its_code_and_its_words() {
    let script = "if [ $RANK = 3 ]; then echo no data >&2; exit 7; fi; exec sleep 600";
    let machines = Machines::new(&["--num_machines", "3", "-n", "6"], script);
    for output in [0, 1, 2].map(|machine| machines.start(machine)).map(wait_with_output) {
        assert_eq!(output.status.code(), Some(7), "{output:?}");
        let stderr = text(&output.stderr);
        let report = &stderr[stderr.find("error: ").unwrap()..];
        assert!(report.starts_with("error: rank 3 (pid "), "{stderr}");
        assert!(
            report.contains(") on machine 1 (host ") && report.contains(" exited with code 7 after "),
            "{stderr}"
        );
        assert!(report.contains("  the end of its stderr:\n    no data\n"), "{stderr}");
    }
}

#[test]
fn a_failed_rank_restarts_all_machines_within_the_budget() {
    let script = "if [ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ]; then exit 3; fi
        echo $TORCHELASTIC_RESTART_COUNT > restarts.$RANK
        [ $RANK = 1 ] && exit ${LAST-0}; [ $LAST ] && exec sleep 600; exit 0";
    for (last, budget) in [("", "2"), ("", "3"), ("5", "2")] {
        let machines = Machines::new(&["--num_machines", "2", "-n", "4", "--max_restarts", budget], script);
        let start = |machine: usize| {
            let mut command = machines.command(&["--machine_rank", &machine.to_string()]);
            if !last.is_empty() {
                command.env("LAST", last);
            }
            command.spawn().unwrap()
        };
        for output in [0, 1].map(start).map(wait_with_output) {
            let code = if last.is_empty() { 0 } else { 5 };
            assert_eq!(output.status.code(), Some(code), "{output:?}");
            let stderr = text(&output.stderr);
            let first = stderr.find("error: rank 1 (pid ").unwrap();
            let notice = stderr.find(&format!("(restart 1 of {budget})")).unwrap();
            assert!(
                first < notice && stderr.contains(&format!("(restart 2 of {budget})")),
                "{stderr}"
            );
        }
        for rank in 0..4 {
            assert_eq!(number_in(&machines.path(&format!("restarts.{rank}"))), 2);
        }
    }
}

#[test]
fn a_killed_launcher_is_the_cause_and_its_restart_takes_its_place() {
    let script = format!("[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; {STAY}");
    let flags = [
        "--num_machines",
        "2",
        "-n",
        "4",
        "--max_restarts",
        "1",
        "--monitor_interval",
        "0.1",
        "--rdzv_conf",
    ];
    let machines = Machines::new(&[&flags[..], &["keep_alive_timeout=2"]].concat(), &script);
    let [host, mut other] = [0, 1].map(|machine| machines.start(machine));
    let pids = [0, 1, 2, 3].map(|rank| number_in(&machines.path(&format!("pid.{rank}.0"))));
    other.kill().unwrap();
    other.wait().unwrap();
    // At once, before anybody can know that the first is gone.
    let again = machines.start(1);
    let [host, again] = [host, again].map(wait_with_output);
    assert!(host.status.success() && again.status.success(), "{host:?}\n{again:?}");
    let stderr = text(&host.stderr);
    assert!(
        stderr.contains("error: machine 1 (host ") && stderr.contains("is gone: its launcher"),
        "{stderr}"
    );
    assert!(stderr.contains("(restart 1 of 1)"), "{stderr}");
    assert!(pids.iter().all(|pid| !is_running(*pid)));
}

#[test]
fn the_others_end_within_seconds_when_machine_zeros_launcher_is_killed() {
    let machines = Machines::new(&["--num_machines", "2", "-n", "4", "--max_restarts", "3"], STAY);
    let [mut host, other] = [0, 1].map(|machine| machines.start(machine));
    let pids = [0, 1, 2, 3].map(|rank| number_in(&machines.path(&format!("pid.{rank}.0"))));
    host.kill().unwrap();
    host.wait().unwrap();
    let started = Instant::now();
    let output = wait_with_output(other);
    assert!(started.elapsed() < Duration::from_secs(10));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(
        text(&output.stderr).contains("error: lost machine 0's launcher at 127.0.0.1:"),
        "{output:?}"
    );
    for pid in pids {
        wait_until("all ranks are gone", || !is_running(pid));
    }
    // No stale port: the next run has it.
    TcpListener::bind(("127.0.0.1", machines.port)).unwrap();
}

#[test]
fn machines_may_leave_and_come_while_a_run_with_a_range_goes_on() {
    // Each round tells its world; the run ends when somebody asks.
    let script = "echo $WORLD_SIZE > new.$RANK; mv new.$RANK world.$RANK; while [ ! -e end ]; do sleep 0.02; done";
    let flags = [
        "--num_machines",
        "1:3",
        "-n",
        "6",
        "--monitor_interval",
        "0.1",
        "--rdzv_conf",
    ];
    let conf = "keep_alive_timeout=2,last_call_timeout=0.5";
    let machines = Machines::new(&[&flags[..], &[conf]].concat(), script);
    let world_is = |size: u32| {
        for rank in 0..size {
            let file = machines.path(&format!("world.{rank}"));
            wait_until(&format!("rank {rank} is in a world of {size}"), || {
                fs::read_to_string(&file).is_ok_and(|text| text.trim() == size.to_string())
            });
        }
    };
    let host = machines.start(0);
    world_is(2);
    let one = machines.start(1);
    let mut two = machines.start(2);
    world_is(6);
    // One is killed: the others go on without it, with numbers that have no gap.
    two.kill().unwrap();
    two.wait().unwrap();
    world_is(4);
    // One is asked to leave, and does.
    send(Signal::TERM, one.id());
    let left = wait_with_output(one);
    assert_eq!(left.status.code(), Some(143), "{left:?}");
    world_is(2);
    let two = machines.start(2);
    world_is(4);
    fs::write(machines.path("end"), "").unwrap();
    for output in [host, two].map(wait_with_output) {
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
fn launchers_that_do_not_agree_are_turned_away_by_name() {
    let timeout = ["--rdzv_conf", "timeout=4"];
    let machines = Machines::new(&[&["--num_machines", "2"][..], &timeout].concat(), "exit 0");
    let host = machines.start(0);
    // Of its kind already there, told otherwise, or of another size.
    let mut other_program = machines.command(&["--machine_rank", "1", "-n", "2"]);
    other_program.arg("--lr");
    let cases = [
        (
            machines.command(&["--machine_rank", "1", "-n", "4"]),
            "--num_processes is \"4\" there and \"2\" on machine 0",
        ),
        (
            other_program,
            "its arguments is \"program --lr\" there and \"program\" on machine 0",
        ),
        (
            machines.command(&["--machine_rank", "1", "--mixed_precision", "bf16"]),
            "ACCELERATE_MIXED_PRECISION",
        ),
    ];
    for (mut command, part) in cases {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{part}: {output:?}");
        let stderr = text(&output.stderr);
        assert!(
            stderr.contains("was turned away: ") && stderr.contains(part),
            "{part}: {stderr}"
        );
    }
    // The right one never comes.
    let output = wait_with_output(host);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("error: 1 of 2 machines came within 4 s: machine 0 (host "),
        "{stderr}"
    );
    assert!(
        stderr.contains("  missing: machine 1\n") && stderr.contains("turned away"),
        "{stderr}"
    );
}

#[test]
fn two_launchers_with_one_number_do_not_both_take_part() {
    let machines = Machines::new(&["--num_machines", "3", "--monitor_interval", "0.1"], "exit 0");
    let host = machines.start(0);
    // Whichever comes first stays, and the other one is turned away.
    let mut rivals = [machines.start(1), machines.start(1)];
    let mut ended = None;
    wait_until("one of the two is turned away", || {
        ended = rivals.iter_mut().position(|rival| rival.try_wait().unwrap().is_some());
        ended.is_some()
    });
    let [first, second] = rivals;
    let (turned_away, stays) = if ended == Some(0) {
        (first, second)
    } else {
        (second, first)
    };
    let turned_away = wait_with_output(turned_away);
    assert_eq!(turned_away.status.code(), Some(2), "{turned_away:?}");
    assert!(
        text(&turned_away.stderr).contains("has that number already"),
        "{turned_away:?}"
    );
    let last = machines.start(2);
    for output in [host, stays, last].map(wait_with_output) {
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
fn a_launcher_without_the_secret_or_without_machine_zero_says_so() {
    let machines = Machines::new(&["--num_machines", "2", "--rdzv_conf", "timeout=20"], "exit 0");
    let host = machines.start(0);
    let mut stranger = machines.command(&["--machine_rank", "1"]);
    stranger.env("SCONCE_STORE_SECRET", "a secret of somebody else");
    let mut output = stranger.output().unwrap();
    assert!(text(&output.stderr).contains("wrong secret"), "{output:?}");
    assert_eq!(output.status.code(), Some(1));
    send(Signal::INT, host.id());
    // Before it has ranks it may end of the signal itself.
    let status = wait_with_output(host).status;
    assert!(status.code() == Some(130) || status.signal() == Some(2), "{status}");

    let alone = Machines::new(&["--num_machines", "2", "--rdzv_conf", "timeout=0.3"], "exit 0");
    output = alone.command(&["--machine_rank", "1"]).output().unwrap();
    assert!(text(&output.stderr).contains("the launchers do not meet"), "{output:?}");
    output = launcher()
        .args([
            "--num_machines",
            "2",
            "--machine_rank",
            "1",
            "--main_process_ip",
            "198.18.0.1",
            "true",
        ])
        .env_remove("SCONCE_STORE_SECRET")
        .env_remove("SLURM_JOB_ID")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(
        text(&output.stderr).contains("hint: export SCONCE_STORE_SECRET"),
        "{output:?}"
    );
}

#[test]
fn machines_without_numbers_take_them_by_themselves() {
    let machines = Machines::new(
        &["--num_machines", "3", "--rdzv_backend", "c10d"],
        "echo $RANK of $WORLD_SIZE",
    );
    let children = [(); 3].map(|()| machines.command(&[]).spawn().unwrap());
    let mut lines = Vec::new();
    for output in children.map(wait_with_output) {
        assert!(output.status.success(), "{output:?}");
        lines.push(text(&output.stdout));
    }
    lines.sort();
    assert_eq!(lines, [0, 1, 2].map(|rank| format!("[rank {rank}] {rank} of 3\n")));
}
