//! `cargo xtask launch-faults`: what becomes of a run over three hosts when parts of it die.
//!
//! The hosts are network namespaces, so that launchers and ranks meet over a network that can be cut. Each has a launcher
//! with two ranks, which are shell scripts that count steps and go on from the last one that they wrote down. Ranks and
//! launchers are killed with SIGKILL, which nobody can catch; afterwards no rank may run, nobody may wait to be reaped by a
//! launcher, and no port may be listened to.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use xshell::{Shell, cmd};

use crate::namespaces::Namespaces;
use crate::test_totals::TestTotals;

/// What happens to a run, and what must follow.
type Fault = fn(&mut Run<'_>) -> Result<()>;

const HOSTS: usize = 3;
const RANKS: usize = 6;
/// Longer than anything here takes.
const DEADLINE: Duration = Duration::from_secs(60);

/// A rank: tells its process, its world and the step from which it goes on, then takes steps until somebody ends the run.
const RANK: &str = r#"
name=$RANK.$ROUND
step=$(cat step.$RANK 2>/dev/null || echo 0)
echo "$$ $WORLD_SIZE $step" > new.$name; mv new.$name rank.$name
while [ ! -e finish ]; do
    step=$((step + 1)); echo $step > new.$name; mv new.$name step.$RANK
    sleep 0.02
done
"#;

/// Runs every fault; each counts as a test.
///
/// # Errors
/// When namespaces cannot be made, or a run does not do what it must.
pub(crate) fn run(shell: &Shell, root: &Path) -> Result<TestTotals> {
    // As a test's program, since the launcher alone would have other features, and all below it were built once more.
    let build = "test --quiet --workspace --test launch --no-run".split(' ');
    cmd!(shell, "cargo {build...}").quiet().ignore_stderr().run()?;
    let hosts = Namespaces::make(shell, HOSTS)?;
    let cases: [(&str, Fault); 6] = [
        ("each rank killed in turn: six restarts", every_rank_is_killed),
        ("a rank killed without restarts left", a_rank_is_killed_without_budget),
        ("a launcher killed and started again", a_launcher_is_killed_and_returns),
        (
            "a launcher killed where fewer hosts will do",
            a_launcher_is_killed_for_good,
        ),
        ("a host cut off from the network", a_host_is_cut_off),
        ("the first host's launcher killed", the_first_launcher_is_killed),
    ];
    let mut totals = TestTotals::default();
    for (number, (name, case)) in cases.into_iter().enumerate() {
        let started = Instant::now();
        let mut run = Run::new(&hosts, root, number)?;
        case(&mut run)
            .and_then(|()| run.leaves_nothing())
            .with_context(|| format!("launch-faults: {name}\n{}", run.logs()))?;
        totals.passed += 1;
        println!(
            "launch-faults: {name}: as it must, in {:.1} s",
            started.elapsed().as_secs_f64()
        );
    }
    Ok(totals)
}

fn every_rank_is_killed(run: &mut Run<'_>) -> Result<()> {
    run.start_all(&["--num_machines", "3", "--max_restarts", "6"])?;
    for round in 0..RANKS {
        let ranks = run.ranks_of_round(round, RANKS)?;
        run.kill(ranks[round].process)?;
    }
    let last = run.ranks_of_round(RANKS, RANKS)?;
    ensure!(
        last.iter().all(|rank| rank.step > 0),
        "ranks began anew in place of going on: {last:?}"
    );
    run.finish()?;
    for host in 0..HOSTS {
        ensure!(run.exit_code(host)? == 0, "host {host} did not end well");
        let log = run.log(host);
        let causes = log.lines().filter(|line| line.starts_with("error: "));
        let causes = Vec::from_iter(causes);
        ensure!(causes.len() == RANKS, "host {host} tells {} causes", causes.len());
        for (rank, cause) in causes.iter().enumerate() {
            let machine = rank / 2;
            let starts = cause.starts_with(&format!("error: rank {rank} (pid "));
            let names = cause.contains(&format!(") on machine {machine} (host {})", run.hosts.names[machine]));
            ensure!(
                starts && names && cause.contains("SIGKILL"),
                "host {host} tells: {cause}"
            );
        }
    }
    Ok(())
}

fn a_rank_is_killed_without_budget(run: &mut Run<'_>) -> Result<()> {
    run.start_all(&["--num_machines", "3"])?;
    let ranks = run.ranks_of_round(0, RANKS)?;
    run.kill(ranks[3].process)?;
    for host in 0..HOSTS {
        ensure!(
            run.exit_code(host)? == 137,
            "host {host} has another exit code than the rank"
        );
        let log = run.log(host);
        ensure!(
            log.starts_with("error: rank 3 (pid "),
            "host {host} does not begin with the cause"
        );
    }
    Ok(())
}

fn a_launcher_is_killed_and_returns(run: &mut Run<'_>) -> Result<()> {
    let flags = [
        "--num_machines",
        "3",
        "--max_restarts",
        "1",
        "--rdzv_conf",
        "keep_alive_timeout=2",
    ];
    run.start_all(&flags)?;
    run.ranks_of_round(0, RANKS)?;
    run.kill_launcher(2)?;
    run.start(2, &flags)?;
    run.ranks_of_round(1, RANKS)?;
    run.finish()?;
    for host in 0..HOSTS {
        ensure!(run.exit_code(host)? == 0, "host {host} did not end well");
        ensure!(
            host == 2 || run.log(host).contains("error: machine 2 (host "),
            "host {host} does not name the host that was lost"
        );
    }
    Ok(())
}

fn a_launcher_is_killed_for_good(run: &mut Run<'_>) -> Result<()> {
    run.start_all(&ELASTIC)?;
    run.ranks_of_round(0, RANKS)?;
    run.kill_launcher(1)?;
    // Machine 2 is now number 1.
    run.ranks_of_round(1, 4)?;
    run.finish()?;
    for host in [0, 2] {
        ensure!(run.exit_code(host)? == 0, "host {host} did not end well");
    }
    Ok(())
}

fn a_host_is_cut_off(run: &mut Run<'_>) -> Result<()> {
    run.start_all(&ELASTIC)?;
    let first = run.ranks_of_round(0, RANKS)?;
    let name = &run.hosts.names[2];
    cmd!(run.hosts.shell, "ip -n {name} link set cable down")
        .quiet()
        .run()?;
    ensure!(
        run.exit_code(2)? == 1,
        "the host that is cut off did not end with an error"
    );
    ensure!(
        run.log(2).contains("error: lost machine 0's launcher"),
        "it does not say why it ended"
    );
    run.ranks_of_round(1, 4)?;
    ensure!(
        first.iter().all(|rank| !is_there(rank.process)),
        "ranks of the first round still run"
    );
    run.finish()?;
    for host in [0, 1] {
        ensure!(run.exit_code(host)? == 0, "host {host} did not end well");
    }
    cmd!(run.hosts.shell, "ip -n {name} link set cable up").quiet().run()?;
    Ok(())
}

fn the_first_launcher_is_killed(run: &mut Run<'_>) -> Result<()> {
    run.start_all(&["--num_machines", "3", "--max_restarts", "3"])?;
    run.ranks_of_round(0, RANKS)?;
    let killed = Instant::now();
    run.kill_launcher(0)?;
    for host in [1, 2] {
        ensure!(run.exit_code(host)? == 1, "host {host} did not end with an error");
        ensure!(
            run.log(host).contains("error: lost machine 0's launcher"),
            "host {host} does not say why"
        );
    }
    let taken = killed.elapsed();
    ensure!(taken < Duration::from_secs(10), "the others took {taken:?} to notice");
    // The same port serves the next run at once.
    run.leaves_nothing()?;
    run.start_all(&["--num_machines", "3"])?;
    run.ranks_of_round(0, RANKS)?;
    run.finish()?;
    for host in 0..HOSTS {
        ensure!(
            run.exit_code(host)? == 0,
            "host {host} did not end well after the port was used before"
        );
    }
    Ok(())
}

/// Two hosts will do, and it is soon clear who is there.
const ELASTIC: [&str; 4] = [
    "--num_machines",
    "2:3",
    "--rdzv_conf",
    "keep_alive_timeout=2,last_call_timeout=1",
];

/// One run, in a folder that its ranks have in common.
struct Run<'a> {
    hosts: &'a Namespaces<'a>,
    launcher: PathBuf,
    folder: PathBuf,
    /// By host: the newest launcher there.
    launchers: [Option<Child>; HOSTS],
    /// All processes that ever were ranks.
    ranks: Vec<u32>,
}

/// What a rank has told of itself.
#[derive(Debug, Clone, Copy)]
struct Rank {
    process: u32,
    step: u64,
}

impl<'a> Run<'a> {
    fn new(hosts: &'a Namespaces<'a>, root: &Path, number: usize) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("sconce-faults-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder)?;
        Ok(Self {
            hosts,
            launcher: root.join("target/debug/sconce"),
            folder,
            launchers: Default::default(),
            ranks: Vec::new(),
        })
    }

    fn start_all(&mut self, flags: &[&str]) -> Result<()> {
        for file in fs::read_dir(&self.folder)? {
            fs::remove_file(file?.path())?;
        }
        // The number of a round, which ranks do not find in their environment: restarts, and changes of the hosts.
        let script = format!(
            "ROUND=$(basename $(dirname $(dirname $TORCHELASTIC_ERROR_FILE)))\nROUND=${{ROUND#attempt_}}\n{RANK}"
        );
        fs::write(self.folder.join("rank"), script)?;
        (0..HOSTS).try_for_each(|host| self.start(host, flags))
    }

    fn start(&mut self, host: usize, flags: &[&str]) -> Result<()> {
        let line = format!(
            "exec {} launch -n {RANKS} --machine_rank {host} --main_process_ip {} --monitor_interval 0.2 {} \
             /bin/sh rank 2>> log.{host}",
            self.launcher.display(),
            self.hosts.addresses[0],
            flags.join(" ")
        );
        let words = self.hosts.on(host, &line);
        let launcher = Command::new(&words[0])
            .args(&words[1..])
            .env("SCONCE_STORE_SECRET", "the secret of the faults")
            .current_dir(&self.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        self.launchers[host] = Some(launcher);
        Ok(())
    }

    /// Waits until a world of `size` ranks runs in `round`.
    fn ranks_of_round(&mut self, round: usize, size: usize) -> Result<Vec<Rank>> {
        let mut ranks = Vec::new();
        for rank in 0..size {
            let file = self.folder.join(format!("rank.{rank}.{round}"));
            let mut numbers = Vec::new();
            wait_until(&format!("rank {rank} runs in round {round}"), || {
                let told = fs::read_to_string(&file).unwrap_or_default();
                numbers = told
                    .split_whitespace()
                    .filter_map(|number| number.parse().ok())
                    .collect();
                numbers.len() == 3
            })?;
            ensure!(
                numbers[1] == size as u64,
                "rank {rank} has a world of {} ranks",
                numbers[1]
            );
            let process = u32::try_from(numbers[0])?;
            self.ranks.push(process);
            let step = numbers[2];
            ranks.push(Rank { process, step });
        }
        // Each has something to go on from.
        for rank in 0..size {
            let file = self.folder.join(format!("step.{rank}"));
            wait_until(&format!("rank {rank} has taken a step"), || file.exists())?;
        }
        Ok(ranks)
    }

    fn kill(&self, process: u32) -> Result<()> {
        let process = process.to_string();
        Ok(cmd!(self.hosts.shell, "kill -KILL {process}").quiet().run()?)
    }

    fn kill_launcher(&mut self, host: usize) -> Result<()> {
        let mut launcher = self.launchers[host].take().context("the launcher was started")?;
        launcher.kill()?;
        launcher.wait()?;
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        Ok(fs::write(self.folder.join("finish"), "")?)
    }

    fn exit_code(&mut self, host: usize) -> Result<i32> {
        let launcher = self.launchers[host].as_mut().context("the launcher was started")?;
        let mut status = None;
        wait_until(&format!("the launcher of host {host} ends"), || {
            status = launcher.try_wait().ok().flatten();
            status.is_some()
        })?;
        status
            .and_then(|status| status.code())
            .context("the launcher was killed")
    }

    fn log(&self, host: usize) -> String {
        fs::read_to_string(self.folder.join(format!("log.{host}"))).unwrap_or_default()
    }

    fn logs(&self) -> String {
        (0..HOSTS)
            .map(|host| format!("--- host {host}\n{}", self.log(host)))
            .collect()
    }

    /// Checks that no rank runs, nobody waits to be reaped by a launcher, and no port is listened to.
    fn leaves_nothing(&self) -> Result<()> {
        for rank in &self.ranks {
            wait_until(&format!("process {rank}, which was a rank, is gone"), || {
                !is_there(*rank)
            })?;
        }
        for name in &self.hosts.names {
            let sockets = cmd!(
                self.hosts.shell,
                "ip netns exec {name} cat /proc/net/tcp /proc/net/tcp6"
            );
            let sockets = sockets.quiet().read()?;
            let listening = |line: &&str| line.split_whitespace().nth(3) == Some("0A");
            if let Some(socket) = sockets.lines().find(listening) {
                bail!("somebody still listens on {name}: {socket}");
            }
        }
        Ok(())
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        for launcher in self.launchers.iter_mut().flatten() {
            let _ = launcher.kill();
            let _ = launcher.wait();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Whether a process runs, or waits to be reaped by somebody other than the system's first process, which may take its
/// time.
fn is_there(process: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{process}/stat")) else {
        return false;
    };
    let mut words = stat.rsplit(") ").next().unwrap_or_default().split(' ');
    let (state, parent) = (words.next(), words.next());
    !(state == Some("Z") && parent == Some("1"))
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) -> Result<()> {
    let started = Instant::now();
    while !condition() {
        ensure!(started.elapsed() < DEADLINE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
