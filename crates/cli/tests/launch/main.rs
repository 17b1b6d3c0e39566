//! `sconce launch` as its users see it: the real binary, with shell scripts for ranks.

mod accelerate;
mod command_line;
mod configuration_files;
mod cpu_affinity;
mod environment;
mod fully_sharded;
mod gpu_ids;
mod logs;
mod machines;
mod mpirun;
mod output;
mod programs;
mod restarts;
mod sharding;
mod stopping;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sconce_collectives::World;
use sconce_collectives::store::{Secret, StoreClient};
use tempfile::TempDir;

/// Longer than anything here takes on a loaded machine: a test that waits this long has failed.
const DEADLINE: Duration = Duration::from_secs(60);

/// A folder with a script, and the launcher's command line so far.
struct Launch {
    folder: TempDir,
    command: Command,
}

impl Launch {
    /// Prepares `sconce launch FLAGS... /bin/sh SCRIPT` in a folder of its own, where the text of SCRIPT is `script`.
    fn new(flags: &[&str], script: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("program");
        // The shell reads it. To execute it would fail now and then: while another test forks, its child holds this
        // file open for writing too.
        fs::write(&program, script).unwrap();
        let mut command = launcher();
        command.args(flags).arg("/bin/sh").arg(program).current_dir(&folder);
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
        // Nobody's default configuration file.
        .env("HF_HOME", "/dev/null")
        .env_remove("RAYON_NUM_THREADS")
        .env_remove("SCONCE_BACKEND")
        .env_remove("SCONCE_DEVICE")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env_remove("OMP_NUM_THREADS");
    let of_settings = |name: &str| {
        ["ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"]
            .iter()
            .any(|start| name.starts_with(start))
    };
    for (name, _) in std::env::vars().filter(|(name, _)| of_settings(name)) {
        command.env_remove(name);
    }
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

/// The state of a process (`R`, `S`, `T` for stopped, `Z` for ended but not reaped, ...), if there is one.
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(") ").next()?.chars().next()
}

/// Whether the process is there and not only waiting to be reaped by whoever inherited it.
fn is_running(pid: u32) -> bool {
    !matches!(state(pid), None | Some('Z' | 'X'))
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
