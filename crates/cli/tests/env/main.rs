//! `sconce env`, and what a GPU that cannot be had says to whoever asks for it, in builds with CUDA and without.

use std::path::Path;
use std::process::{Command, Output};

/// Set in ranks that the launcher starts here.
const IS_RANK: &str = "SCONCE_TEST_IS_RANK";

fn sconce(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sconce"));
    command.args(words);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("SCONCE_") || name.starts_with("CUDA_")) {
        command.env_remove(name);
    }
    command
}

fn printed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The value after `key: `.
fn value<'t>(text: &'t str, key: &str) -> &'t str {
    let value = |line: &'t str| line.strip_prefix(key)?.strip_prefix(": ");
    text.lines()
        .find_map(value)
        .unwrap_or_else(|| panic!("no {key} in\n{text}"))
}

fn has_driver() -> bool {
    Path::new("/proc/driver/nvidia/version").exists()
}

#[test]
fn versions_features_and_the_machine_are_told_in_lines() {
    let text = printed(&mut sconce(&["env"]));
    let version = env!("CARGO_PKG_VERSION");
    assert!(value(&text, "sconce").starts_with(version), "{text}");
    let built = [
        ("cuda", cfg!(feature = "cuda")),
        ("mpi", cfg!(feature = "mpi")),
        ("nccl", cfg!(feature = "nccl")),
    ];
    let features = value(&text, "features");
    for (feature, is_built) in built {
        assert_eq!(features.contains(feature), is_built, "{features}");
    }
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert!(value(&text, "kernel").contains(kernel.trim()), "{text}");
    let cores = std::thread::available_parallelism().unwrap().to_string();
    assert!(value(&text, "cores").starts_with(&format!("{cores} usable")), "{text}");
    assert!(value(&text, "memory").contains(" GiB"), "{text}");
    for key in [
        "os",
        "cpu",
        "gpu driver",
        "gpus",
        "nccl",
        "mpi",
        "mpirun",
        "configuration",
    ] {
        assert!(!value(&text, key).is_empty(), "{key}");
    }
}

#[test]
fn candle_is_the_version_that_is_locked() {
    let lock = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.lock")).unwrap();
    let (_, locked) = lock.split_once("name = \"candle-core\"\nversion = \"").unwrap();
    let (locked, _) = locked.split_once('"').unwrap();
    assert_eq!(
        value(&printed(&mut sconce(&["env"])), "candle"),
        locked,
        "the constant in env/mod.rs"
    );
}

#[test]
fn variables_that_are_set_are_told_but_for_secrets() {
    let secret = "sixteen characters and more";
    let set = [
        ("RANK", "3"),
        ("SCONCE_TIMEOUT", "60"),
        ("FSDP_VERSION", "2"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
        ("SCONCE_STORE_SECRET", secret),
    ];
    let text = printed(sconce(&["env"]).envs(set));
    for (name, told) in &set[..4] {
        assert_eq!(value(&text, name), *told);
    }
    assert!(
        value(&text, "SCONCE_STORE_SECRET").contains("not shown") && !text.contains(secret),
        "{text}"
    );
    assert!(!text.contains("SCONCE_BACKEND"), "what is not set is not told: {text}");
}

#[test]
fn json_has_the_same_facts() {
    let command = |words| {
        let mut command = sconce(words);
        command.env("SCONCE_TIMEOUT", "60");
        command
    };
    let text = printed(&mut command(&["env"]));
    let json: serde_json::Value = serde_json::from_str(&printed(&mut command(&["env", "--json"]))).unwrap();
    for (key, told) in json.as_object().unwrap().iter().filter(|(key, _)| *key != "variables") {
        // What is available changes from moment to moment.
        if key != "memory" {
            assert_eq!(told, value(&text, key), "{key}");
        }
    }
    assert_eq!(json["variables"]["SCONCE_TIMEOUT"], "60");
}

#[test]
fn mpirun_is_told_with_its_version_or_as_missing() {
    let text = printed(sconce(&["env"]).env("PATH", "/nowhere"));
    assert_eq!(value(&text, "mpirun"), "none in PATH");
    let folder = tempfile::tempdir().unwrap();
    let script = "#!/bin/sh\necho 'mpirun (Open MPI) 9.9.9'\necho\necho more";
    // Written by another process: while this one holds it open for writing, it cannot be executed.
    let mut writer = Command::new("/bin/sh");
    writer.args(["-c", "printf '%s' \"$0\" > mpirun; chmod +x mpirun", script]);
    assert!(writer.current_dir(&folder).status().unwrap().success());
    let text = printed(sconce(&["env"]).env("PATH", folder.path()));
    let expected = format!("mpirun (Open MPI) 9.9.9, {}/mpirun", folder.path().display());
    assert_eq!(value(&text, "mpirun"), expected);
}

#[test]
fn gpus_are_told_with_the_reason_why_there_are_none() {
    if has_driver() {
        println!("skipped: this machine has a driver");
        return;
    }
    let text = printed(&mut sconce(&["env"]));
    let reason = if cfg!(feature = "cuda") {
        "none: libcuda.so.1 (the NVIDIA driver) is not present: install the driver"
    } else {
        "none: this program was built without CUDA: build it with `--features cuda`"
    };
    assert!(value(&text, "gpus").starts_with(reason), "{text}");
    if !cfg!(feature = "nccl") {
        assert!(value(&text, "nccl").starts_with("none: this program was built without the feature nccl"));
    }
}

/// The ranks' side of the next test; does nothing unless started by it.
#[test]
fn rank_main() {
    if std::env::var_os(IS_RANK).is_none() {
        return;
    }
    if let Err(error) = sconce_core::accelerator() {
        eprintln!("error: {error}");
        std::process::exit(7);
    }
}

#[test]
fn a_rank_that_asks_for_a_gpu_fails_with_the_reason() {
    if has_driver() {
        println!("skipped: this machine has a driver");
        return;
    }
    let reason = if cfg!(feature = "cuda") {
        "device cuda:0 requested, but libcuda.so.1 (the NVIDIA driver) is not present: install the driver"
    } else {
        "device cuda:0 requested, but this program was built without CUDA: build it with `--features cuda`"
    };
    let this = std::env::current_exe().unwrap();
    let mut launch = sconce(&["launch", "-n", "2", "--gpu_ids", "0,1"]);
    launch.arg(this).args(["--exact", "rank_main", "--nocapture"]);
    launch.envs([(IS_RANK, "1"), ("SCONCE_DEVICE", "cuda")]);
    let Output { status, stderr, .. } = launch.output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(7), "{stderr}");
    assert!(stderr.contains(&format!("[rank 0] error: {reason}")), "{stderr}");
    assert!(!stderr.contains("panicked"), "{stderr}");
}
