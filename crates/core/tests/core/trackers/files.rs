//! Trackers of text files, read back as their formats' own programs read them.

use super::{alone, files_below, log_two_steps};
use sconce_core::trackers::Trackers;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// The smallest file that begins as a PNG does: 3 by 2 pixels.
pub(super) const PNG_HEAD: &[u8] = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\0\x03\0\0\0\x02\x08\x02\0\0\0";

/// The lines of a JSONL file, without wall times, which are checked.
fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let line = |line: &str| {
        let mut object: Value = serde_json::from_str(line).unwrap();
        let time = object.as_object_mut().unwrap().remove("wall_time").unwrap();
        assert!(time.as_f64().unwrap() > 1.6e9, "seconds since 1970");
        object
    };
    text.lines().map(line).collect()
}

#[test]
fn json_lines_have_the_run_and_a_line_for_every_step() {
    let folder = tempfile::tempdir().unwrap();
    log_two_steps(folder.path(), "jsonl");
    let lines = lines(&folder.path().join("demo/metrics.jsonl"));
    assert_eq!(lines[0]["project"], "demo");
    assert_eq!(lines[0]["config"]["model"]["layers"], 2);
    assert_eq!(lines[1], json!({"step": 0, "loss": 2.5, "train/lr": 1e-3}));
    assert_eq!(lines[2], json!({"step": 1, "loss": "NaN", "eval,\"loss\"": 0.25}));
}

#[test]
fn a_run_that_goes_on_after_a_crash_leaves_every_line_whole() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["jsonl", "csv"] {
        log_two_steps(folder.path(), name);
        let path = folder.path().join(format!("demo/metrics.{name}"));
        let whole = fs::read_to_string(&path).unwrap();
        let torn = whole.trim_end().to_owned() + if name == "csv" { "\n2,17" } else { "\n{\"step\":2,\"lo" };
        fs::write(&path, torn).unwrap();
        log_two_steps(folder.path(), name);
        let both = fs::read_to_string(&path).unwrap();
        assert!(both.starts_with(&whole), "{both}");
        let added = if name == "csv" { 2 } else { 3 };
        assert_eq!(both.lines().count(), whole.lines().count() + added, "{both}");
    }
    assert_eq!(lines(&folder.path().join("demo/metrics.jsonl")).len(), 6);
}

#[test]
fn columns_of_a_table_grow_and_every_row_has_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    log_two_steps(folder.path(), "csv");
    log_two_steps(folder.path(), "csv");
    let text = fs::read_to_string(folder.path().join("demo/metrics.csv")).unwrap();
    let rows = Vec::from_iter(text.lines());
    assert_eq!(rows[0], "step,wall_time,loss,train/lr,\"eval,\"\"loss\"\"\"");
    let values = |row: &str| {
        let mut cells = Vec::from_iter(row.split(',').map(str::to_owned));
        assert!(cells.remove(1).parse::<f64>().unwrap() > 1.6e9);
        cells
    };
    for again in [0, 2] {
        assert_eq!(values(rows[1 + again]), ["0", "2.5", "0.001", ""]);
        assert_eq!(values(rows[2 + again]), ["1", "NaN", "", "0.25"]);
    }
    assert_eq!(files_below(folder.path()).len(), 1, "nothing is left over");
}

#[test]
fn a_table_of_another_form_is_not_written_to() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("demo")).unwrap();
    let path = folder.path().join("demo/metrics.csv");
    for foreign in ["a,b\n1,2\n", "step,wall_time,\"open\n", "step,wall_timely\n"] {
        fs::write(&path, foreign).unwrap();
        let trackers = Trackers::from_names("csv", folder.path()).unwrap().strict(true);
        let error = alone().init_trackers("demo", &(), trackers).unwrap_err().to_string();
        assert!(
            error.contains("metrics.csv: it does not begin with the columns"),
            "{error}"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), foreign);
    }
}

#[test]
fn names_that_a_file_has_for_itself_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let cases = [
        ("jsonl", "step"),
        ("jsonl", "config"),
        ("csv", "wall_time"),
        ("csv", "two\nlines"),
        ("mlflow", "../../escape"),
        ("mlflow", "/absolute"),
        ("dvclive", "a/../../b"),
        ("dvclive", ""),
    ];
    for (tracker, name) in cases {
        let acc = alone();
        let trackers = Trackers::from_names(tracker, folder.path()).unwrap().strict(true);
        acc.init_trackers("demo", &(), trackers).unwrap();
        let error = acc.log(&[(name, 1.0)], 0).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("tracker {tracker}: the name {name:?}: ")),
            "{error}"
        );
    }
}

#[test]
fn mlflow_finds_experiment_run_parameters_and_metrics_where_it_looks_for_them() {
    let folder = tempfile::tempdir().unwrap();
    log_two_steps(folder.path(), "mlflow");
    log_two_steps(folder.path(), "mlflow");
    let mut experiments = fs::read_dir(folder.path().join("mlruns")).unwrap();
    let experiment = experiments.next().unwrap().unwrap().path();
    assert!(experiments.next().is_none(), "both runs are of one experiment");
    let facts = fs::read_to_string(experiment.join("meta.yaml")).unwrap();
    let id = experiment.file_name().unwrap().to_str().unwrap();
    for fact in [
        &format!("experiment_id: \"{id}\""),
        "name: \"demo\"",
        "lifecycle_stage: \"active\"",
    ] {
        assert!(facts.lines().any(|line| line == fact), "{fact} in\n{facts}");
    }
    let runs = Vec::from_iter(fs::read_dir(&experiment).unwrap().map(|entry| entry.unwrap().path()));
    let runs = Vec::from_iter(runs.into_iter().filter(|path| path.is_dir()));
    assert_eq!(runs.len(), 2);
    for run in runs {
        let facts = fs::read_to_string(run.join("meta.yaml")).unwrap();
        assert!(
            facts.lines().any(|line| line == "status: 3") && !facts.contains("end_time: null"),
            "{facts}"
        );
        let read = |path: &str| fs::read_to_string(run.join(path)).unwrap();
        assert_eq!(read("params/epsilon"), "1e-8");
        assert_eq!(read("params/model/layers"), "2");
        assert_eq!(read("params/betas"), "[0.9,0.999]");
        assert!(read("tags/mlflow.runName").starts_with("demo-"));
        let loss = read("metrics/loss");
        let words = Vec::from_iter(loss.lines().map(|line| Vec::from_iter(line.split(' '))));
        assert!(
            words[0][0].parse::<u64>().unwrap() > 1_600_000_000_000,
            "milliseconds: {loss}"
        );
        assert_eq!([&words[0][1..], &words[1][1..]], [["2.5", "0"], ["NaN", "1"]]);
        assert!(run.join("metrics/train/lr").is_file() && run.join("metrics/eval__loss_").is_file());
    }
}

#[test]
fn dvclive_has_latest_values_plots_and_parameters() {
    let folder = tempfile::tempdir().unwrap();
    log_two_steps(folder.path(), "dvclive");
    let read = |path: &str| fs::read_to_string(folder.path().join("dvclive").join(path)).unwrap();
    let latest: Value = serde_json::from_str(&read("metrics.json")).unwrap();
    let expected = json!({"step": 1, "loss": "NaN", "train": {"lr": 1e-3}, "eval,\"loss\"": 0.25});
    assert_eq!(latest, expected);
    assert_eq!(read("plots/metrics/loss.tsv"), "step\tloss\n0\t2.5\n1\tNaN\n");
    assert_eq!(read("plots/metrics/train/lr.tsv"), "step\tlr\n0\t0.001\n");
    let parameters = read("params.yaml");
    for line in [
        "epsilon: 1.0e-8",
        "model:",
        "  layers: 2",
        "  name: \"a: b\"",
        "betas: [0.9,0.999]",
    ] {
        assert!(parameters.lines().any(|other| other == line), "{line} in\n{parameters}");
    }
}

#[test]
fn images_and_texts_are_files_where_a_tracker_has_a_place_for_them() {
    let folder = tempfile::tempdir().unwrap();
    let acc = alone();
    let trackers = Trackers::from_names("mlflow,dvclive,csv", folder.path())
        .unwrap()
        .strict(true);
    acc.init_trackers("demo", &(), trackers).unwrap();
    acc.log_image("samples/first", PNG_HEAD, 5).unwrap();
    acc.log_text("prompt", "once upon a time", 5).unwrap();
    acc.log_histogram("weights", &[1.0], 5).unwrap();
    let found = files_below(folder.path());
    let has = |end: &str| found.iter().any(|path| path.ends_with(end));
    assert!(has("dvclive/plots/images/samples/first/5.png"), "{found:?}");
    assert!(
        has("artifacts/samples/first/step-5.png") && has("artifacts/prompt/step-5.txt"),
        "{found:?}"
    );
    let error = acc.log_image("samples", b"GIF89a", 6).unwrap_err().to_string();
    assert!(
        error.contains("image \"samples\": it does not begin as a PNG file"),
        "{error}"
    );
    let error = acc.log_image("samples", &PNG_HEAD[..18], 6).unwrap_err().to_string();
    assert!(error.contains("cut off"), "{error}");
}
