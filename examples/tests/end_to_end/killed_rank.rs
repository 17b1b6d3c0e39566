//! A rank killed in mid-training ends the job, named, with nothing left behind.

use crate::{finetune_llama, sconce};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn kill_9_of_one_rank_ends_the_job_and_names_the_rank() {
    let before = shared_memory_files();
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("model");
    let mut launcher = Command::new(sconce());
    launcher.args(["launch", "--num_processes", "3"]).arg(finetune_llama());
    launcher
        .args(["--steps", "1000000", "--logging_steps", "1", "--output_dir"])
        .arg(&output);
    launcher.env("SCONCE_FLIGHT_RECORDER", folder.path());
    let mut launcher = launcher.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();

    // The second printed step: the group is in the middle of training.
    let lines = BufReader::new(launcher.stdout.take().unwrap()).lines();
    let mut steps = lines.map_while(Result::ok).filter(|line| line.contains("loss"));
    assert!(steps.nth(1).is_some(), "two steps were printed");
    let ranks = children_of(launcher.id());
    assert_eq!(ranks.len(), 3, "one process per rank");
    let victim = ranks
        .iter()
        .copied()
        .find(|pid| rank_of(*pid).as_deref() == Some("1"))
        .expect("rank 1 runs");

    let start = Instant::now();
    assert!(
        Command::new("kill")
            .args(["-9", &victim.to_string()])
            .status()
            .unwrap()
            .success()
    );
    steps.for_each(drop);
    let ended = launcher.wait_with_output().unwrap();
    let took = start.elapsed();

    let message = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success());
    assert!(message.contains("rank 1") && message.contains("SIGKILL"), "{message}");
    // Under 2 s on an idle machine; a busy one gets more.
    assert!(took < Duration::from_secs(20), "the job ended {took:?} after the kill");
    assert!(ranks.iter().all(|pid| !is_running(*pid)), "no rank is left");
    assert_eq!(shared_memory_files(), before, "nothing is left in /dev/shm");
    assert!(!output.exists(), "no half-written model");
    println!("the job ended {took:?} after the kill");
}

fn children_of(parent: u32) -> Vec<u32> {
    processes().filter(|pid| parent_of(*pid) == Some(parent)).collect()
}

/// All processes that there are.
pub(crate) fn processes() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").unwrap();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

pub(crate) fn parent_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status
        .lines()
        .find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())
}

fn rank_of(pid: u32) -> Option<String> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let variables = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    variables
        .into_iter()
        .find_map(|variable| variable.strip_prefix("RANK=").map(str::to_owned))
}

fn is_running(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

fn shared_memory_files() -> BTreeSet<String> {
    let files = std::fs::read_dir("/dev/shm")
        .map(|files| files.flatten().collect())
        .unwrap_or_else(|_| Vec::new());
    let names = files
        .into_iter()
        .map(|file| file.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.contains("sconce")).collect()
}
