//! Trackers of the fine-tuning program: what ranks write together, once.

use crate::{text, train};
use std::fs;
use std::path::{Path, PathBuf};

/// The paths of all files below a folder.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("it can be read").path();
        match path.is_dir() {
            true => files.extend(files_below(&path)),
            false => files.push(path),
        }
    }
    files
}

#[test]
fn every_tracker_gets_every_step_once_whatever_the_number_of_ranks() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = |name: &str| folder.path().join(name).to_str().expect("a path of text").to_owned();
    let (logs, metrics) = (path("logs"), path("metrics.jsonl"));
    let arguments = [
        "--steps",
        "3",
        "--report_to",
        "all",
        "--logging_dir",
        &logs,
        "--metrics_out",
        &metrics,
    ];
    let output = train(2, &arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let read = |name: &str| fs::read_to_string(folder.path().join(name)).expect("the file is there");
    let lines = |name: &str| -> Vec<serde_json::Value> {
        let text = read(name);
        text.lines()
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect()
    };
    let (tracked, own) = (lines("logs/finetune_llama/metrics.jsonl"), lines("metrics.jsonl"));
    assert_eq!(tracked[0]["config"]["ranks"], 2);
    assert_eq!((tracked.len(), own.len()), (4, 3));
    for (tracked, own) in tracked[1..].iter().zip(&own) {
        for (name, value) in own.as_object().expect("an object") {
            assert_eq!(&tracked[name], value, "{name}");
        }
        assert!(tracked["memory_mib"].as_f64().is_some_and(|mib| mib > 0.0));
    }
    assert_eq!(read("logs/finetune_llama/metrics.csv").lines().count(), 4);
    assert_eq!(read("logs/dvclive/plots/metrics/loss.tsv").lines().count(), 4);
    let files = files_below(&folder.path().join("logs"));
    let named = |part: &str| Vec::from_iter(files.iter().filter(|path| path.to_string_lossy().contains(part)));
    assert_eq!(named("events.out.tfevents").len(), 1, "{files:?}");
    let losses = named("metrics/loss");
    assert_eq!(losses.len(), 2, "MLflow's and DVCLive's: {files:?}");
    assert!(
        losses
            .iter()
            .all(|path| fs::read_to_string(path).is_ok_and(|text| text.lines().count() >= 3))
    );
}

#[test]
fn a_tracker_that_cannot_write_warns_once_and_the_run_goes_on() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let file = folder.path().join("file");
    fs::write(&file, "not a folder").expect("the folder takes files");
    let path = file.to_str().expect("a path of text");
    let output = train(2, &["--steps", "3", "--report_to", "csv", "--logging_dir", path]);
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let warning = format!("[rank 0] warning: tracker csv: {path}/finetune_llama: ");
    assert!(stderr.starts_with(&warning) && stderr.lines().count() == 1, "{stderr}");
}

#[test]
fn an_unknown_tracker_is_told_once_before_anything_is_done() {
    let output = train(2, &["--steps", "3", "--report_to", "csv,comet_ml"]);
    let stderr = text(&output.stderr);
    assert!(!output.status.success() && text(&output.stdout).is_empty(), "{stderr}");
    let told = stderr
        .lines()
        .filter(|line| line.starts_with("[rank ") && line.contains("\"comet_ml\" is not built in: "));
    assert_eq!(told.count(), 1, "{stderr}");
}
