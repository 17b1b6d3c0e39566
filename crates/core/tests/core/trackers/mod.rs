//! Trackers: what is written, by whom, and what becomes of one that fails.

mod checksum;
mod files;
#[cfg(feature = "mlflow")]
mod mlflow_server;
mod protobuf;
mod tensorboard;
#[cfg(feature = "trackio")]
mod trackio;
mod wandb;

use super::{accelerator, on_ranks};
use sconce_core::trackers::{Moment, NAMES, Run, Tracker, TrackerError, Trackers, tracker_from_name};
use sconce_core::{Accelerator, Error};
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Returns all files below a folder, relative to it and in order.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path.strip_prefix(folder).unwrap().to_owned());
            }
        }
    }
    files.sort();
    files
}

/// Logs two steps with the named trackers below `folder`, on one rank.
fn log_two_steps(folder: &Path, names: &str) {
    let acc = sconce_core::AcceleratorBuilder::default().build_with(|_| None).unwrap();
    let config = json!({"epsilon": 1e-8, "model": {"layers": 2, "name": "a: b"}, "betas": [0.9, 0.999]});
    let trackers = Trackers::from_names(names, folder).unwrap().strict(true);
    acc.init_trackers("demo", &config, trackers).unwrap();
    acc.log(&[("loss", 2.5), ("train/lr", 1e-3)], 0).unwrap();
    acc.log(&[("loss", f64::NAN), ("eval,\"loss\"", 0.25)], 1).unwrap();
    acc.end_training().unwrap();
}

/// Notes what it is told, and fails from a certain call on as a full disk does.
#[derive(Debug)]
struct Watched {
    calls: Arc<Mutex<Vec<String>>>,
    fails_at_step: Option<u64>,
}

impl Tracker for Watched {
    fn name(&self) -> &str {
        "watched"
    }

    fn start(&mut self, run: &Run) -> Result<(), TrackerError> {
        let call = format!("start {} {:?}", run.project(), run.hyper_parameters());
        self.calls.lock().unwrap().push(call);
        Ok(())
    }

    fn log(&mut self, values: &[(&str, f64)], at: Moment) -> Result<(), TrackerError> {
        self.calls.lock().unwrap().push(format!("log {values:?} {}", at.step));
        match self.fails_at_step {
            Some(step) if at.step >= step => {
                let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
                Err(TrackerError::Other(full.into()))
            }
            _ => Ok(()),
        }
    }

    fn finish(&mut self) -> Result<(), TrackerError> {
        self.calls.lock().unwrap().push("finish".into());
        Ok(())
    }
}

fn watched(fails_at_step: Option<u64>) -> (Box<dyn Tracker>, Arc<Mutex<Vec<String>>>) {
    let calls = Arc::default();
    let tracker = Watched {
        calls: Arc::clone(&calls),
        fails_at_step,
    };
    (Box::new(tracker), calls)
}

fn alone() -> Box<dyn Accelerator> {
    sconce_core::AcceleratorBuilder::default().build_with(|_| None).unwrap()
}

#[test]
fn only_the_main_process_writes() {
    let folder = tempfile::tempdir().unwrap();
    on_ranks(3, |communicator| {
        let acc = accelerator(communicator);
        // A folder for each rank, so that one that writes elsewhere is seen.
        let own = folder.path().join(acc.world().rank.to_string());
        let trackers = Trackers::from_names("all", &own).unwrap().strict(true);
        acc.init_trackers("demo", &(), trackers).unwrap();
        acc.log(&[("loss", 1.0)], 0).unwrap();
        acc.log_text("note", "a text", 0).unwrap();
        acc.log_histogram("weights", &[1.0, 2.0], 0).unwrap();
        acc.end_training().unwrap();
    });
    let ranks = Vec::from_iter(
        fs::read_dir(folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name()),
    );
    assert_eq!(ranks, ["0"]);
    assert!(files_below(folder.path()).len() > NAMES.len());
}

#[test]
fn a_tracker_is_told_of_run_steps_and_end_and_of_nothing_before_or_after() {
    let acc = alone();
    let (tracker, calls) = watched(None);
    acc.log(&[("early", 1.0)], 0).unwrap();
    let config = json!({"b": {"c": {"d": "text"}, "e": [1, 2]}, "a": 0.5, "none": {}});
    acc.init_trackers("demo", &config, vec![tracker]).unwrap();
    acc.log(&[("loss", 0.5)], 7).unwrap();
    acc.end_training().unwrap();
    acc.log(&[("late", 1.0)], 8).unwrap();
    acc.end_training().unwrap();
    let calls = calls.lock().unwrap();
    for parameter in [r#"("b/c/d", "text")"#, r#"("b/e", "[1,2]")"#, r#"("a", "0.5")"#] {
        assert!(
            calls[0].starts_with("start demo") && calls[0].contains(parameter),
            "{}",
            calls[0]
        );
    }
    assert_eq!(calls[1..], [r#"log [("loss", 0.5)] 7"#, "finish"]);
}

#[test]
fn a_tracker_that_fails_warns_once_and_the_others_go_on() {
    let acc = alone();
    let (full, full_calls) = watched(Some(1));
    let (sound, sound_calls) = watched(None);
    acc.init_trackers("demo", &(), vec![full, sound]).unwrap();
    for step in 0..4 {
        acc.log(&[("loss", 0.5)], step).unwrap();
    }
    acc.end_training().unwrap();
    let warnings = acc.tracker_warnings();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].starts_with("tracker watched: ") && warnings[0].contains("training goes on"));
    assert!(acc.tracker_warnings().is_empty());
    // Begun, one step, and the step that failed.
    assert_eq!(full_calls.lock().unwrap().len(), 3);
    assert_eq!(sound_calls.lock().unwrap().len(), 6);
}

#[test]
fn warnings_that_nobody_has_taken_outlive_a_new_start() {
    let acc = alone();
    let (full, _) = watched(Some(0));
    let (next, calls) = watched(Some(1));
    acc.init_trackers("demo", &(), vec![full]).unwrap();
    acc.log(&[("loss", 0.5)], 0).unwrap();
    acc.init_trackers("demo", &(), vec![next]).unwrap();
    acc.log(&[("loss", 0.5)], 1).unwrap();
    assert_eq!(acc.tracker_warnings().len(), 2, "one of each start");
    assert_eq!(calls.lock().unwrap().len(), 2, "begun, and the step that failed");
}

#[test]
fn a_strict_tracker_that_fails_is_an_error_that_names_it() {
    let acc = alone();
    let (full, _) = watched(Some(1));
    let (sound, sound_calls) = watched(None);
    acc.init_trackers("demo", &(), Trackers::new(vec![full, sound]).strict(true))
        .unwrap();
    acc.log(&[("loss", 0.5)], 0).unwrap();
    let error = acc.log(&[("loss", 0.5)], 1).unwrap_err();
    assert!(matches!(error, Error::Tracker(TrackerError::Failed { .. })));
    assert!(error.to_string().starts_with("tracker watched: "), "{error}");
    assert_eq!(sound_calls.lock().unwrap().len(), 3, "the other one got the step");
}

#[test]
fn a_folder_that_cannot_be_written_stops_only_strict_runs() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "not a folder").unwrap();
    let acc = alone();
    for name in NAMES {
        let trackers = || Trackers::from_names(name, &file).unwrap();
        acc.init_trackers("demo", &(), trackers()).unwrap();
        acc.log(&[("loss", 0.5)], 0).unwrap();
        acc.end_training().unwrap();
        let warnings = acc.tracker_warnings();
        let place = file.display().to_string();
        assert!(
            warnings.len() == 1 && warnings[0].contains(&place),
            "{name}: {warnings:?}"
        );
        let error = acc.init_trackers("demo", &(), trackers().strict(true)).unwrap_err();
        assert!(error.to_string().contains(&place), "{error}");
    }
}

#[test]
fn a_disk_that_is_full_is_noticed_in_the_step_that_did_not_fit() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("demo")).unwrap();
    // A device of Linux that takes nothing.
    std::os::unix::fs::symlink("/dev/full", folder.path().join("demo/metrics.jsonl")).unwrap();
    let acc = alone();
    acc.init_trackers("demo", &(), Trackers::from_names("jsonl,csv", folder.path()).unwrap())
        .unwrap();
    acc.log(&[("loss", 0.5)], 0).unwrap();
    let warnings = acc.tracker_warnings();
    assert!(
        warnings.len() == 1 && warnings[0].contains("metrics.jsonl: No space left"),
        "{warnings:?}"
    );
    let table = fs::read_to_string(folder.path().join("demo/metrics.csv")).unwrap();
    assert_eq!(table.lines().count(), 2);
}

#[test]
fn names_are_looked_up_and_what_is_not_there_says_what_is() {
    for name in NAMES {
        assert_eq!(tracker_from_name(name, "logs").unwrap().name(), name);
    }
    let said = |names: &str| Trackers::from_names(names, "logs").unwrap_err().to_string();
    assert_eq!(
        said("jsonl,tensorbord"),
        "tracker \"tensorbord\" is not known (did you mean \"tensorboard\"?); known are ".to_owned()
            + &NAMES.join(", ")
            + " and all"
    );
    assert!(!said("neptune.ai").contains("did you mean"));
    assert!(said("").contains("\"\" is not known"));
    let trackio = (!NAMES.contains(&"trackio")).then_some("trackio");
    for service in ["comet_ml", "aim", "clearml", "swanlab"].into_iter().chain(trackio) {
        let message = said(service);
        assert!(
            message.contains("is not built in: ") && message.contains(" use "),
            "{message}"
        );
    }
}

#[test]
fn a_project_is_a_folder_and_a_configuration_is_named_values() {
    let acc = alone();
    for project in ["", "a/b", "..", ".hidden", "two\nlines"] {
        let error = acc.init_trackers(project, &(), vec![]).unwrap_err();
        assert!(error.to_string().contains("a project names a folder"), "{error}");
    }
    let error = acc.init_trackers("demo", &[1, 2], vec![]).unwrap_err();
    assert!(error.to_string().contains("it is [1,2]; give a struct"), "{error}");
}
