//! Trackio's store, by the rows that Trackio 0.43 writes for the same values.

use super::files::PNG_HEAD;
use super::{alone, log_two_steps};
use rusqlite::Connection;
use sconce_core::trackers::Trackers;
use serde_json::{Value, json};
use std::path::Path;

fn rows(folder: &Path, query: &str) -> Vec<(i64, String, Value)> {
    let store = Connection::open(folder.join("trackio/demo.db")).unwrap();
    let mut query = store.prepare(query).unwrap();
    let row = |row: &rusqlite::Row<'_>| {
        let json: Vec<u8> = row.get(2)?;
        Ok((row.get(0)?, row.get(1)?, serde_json::from_slice(&json).unwrap()))
    };
    query.query_map([], row).unwrap().map(Result::unwrap).collect()
}

const METRICS: &str = "SELECT step, run_id, metrics FROM metrics ORDER BY id";

#[test]
fn trackio_has_a_row_for_every_call_and_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let acc = alone();
    let trackers = Trackers::from_names("trackio", folder.path()).unwrap().strict(true);
    acc.init_trackers("de.mo", &json!({"lr": 0.5, "model": {"layers": 2}}), trackers)
        .unwrap();
    acc.log(&[("loss", 2.5), ("train/lr", 1e-3)], 0).unwrap();
    acc.log(&[("loss", f64::NAN), ("most", f64::INFINITY)], 1).unwrap();
    acc.log_text("note", "some text", 2).unwrap();
    acc.log_histogram("h", &[1.0, 2.0, 3.0, 3.0], 3).unwrap();
    acc.log_image("a/picture", PNG_HEAD, 4).unwrap();
    // Not ended yet: other programs can read it.
    let metrics = rows(folder.path(), METRICS);
    let steps = Vec::from_iter(metrics.iter().map(|(step, ..)| *step));
    assert_eq!(steps, [0, 1, 2, 3, 4]);
    assert_eq!(metrics[0].2, json!({"loss": 2.5, "train/lr": 0.001}));
    assert_eq!(metrics[1].2, json!({"loss": "NaN", "most": "Infinity"}));
    assert_eq!(metrics[2].2, json!({"note": "some text"}));
    let histogram = &metrics[3].2["h"];
    assert_eq!(histogram["_type"], "trackio.histogram");
    let [bins, counts] = ["bins", "values"].map(|key| histogram[key].as_array().unwrap().clone());
    assert_eq!((bins.len(), &bins[1], &bins[64]), (65, &json!(1.03125), &json!(3.0)));
    assert_eq!(
        (counts.len(), &counts[0], &counts[32], &counts[63]),
        (64, &json!(1.0), &json!(1.0), &json!(2.0))
    );
    let picture = &metrics[4].2["a/picture"];
    assert_eq!(picture["_type"], "trackio.image");
    let path = picture["file_path"].as_str().unwrap();
    assert!(
        path.starts_with("demo/de.mo-2") && path.ends_with("/4/a/picture.png"),
        "{path}"
    );
    assert_eq!(
        std::fs::read(folder.path().join("trackio/media").join(path)).unwrap(),
        PNG_HEAD
    );

    let configs = rows(folder.path(), "SELECT 0, run_id, config FROM configs");
    assert_eq!(configs.len(), 1);
    assert_eq!(configs[0].1, metrics[0].1, "the same run");
    assert_eq!(
        (&configs[0].2["lr"], &configs[0].2["model"]["layers"]),
        (&json!(0.5), &json!(2))
    );
    acc.end_training().unwrap();
}

#[test]
fn a_store_gets_a_new_run_for_every_start() {
    let folder = tempfile::tempdir().unwrap();
    log_two_steps(folder.path(), "trackio");
    log_two_steps(folder.path(), "trackio");
    let runs = std::collections::BTreeSet::from_iter(rows(folder.path(), METRICS).into_iter().map(|(_, run, _)| run));
    assert_eq!(runs.len(), 2);
}

#[test]
fn a_file_that_is_no_store_is_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trackio/demo.db");
    std::fs::create_dir(folder.path().join("trackio")).unwrap();
    let text = "not a database, and longer than the header of one ".repeat(4);
    std::fs::write(&path, &text).unwrap();
    let acc = alone();
    let trackers = Trackers::from_names("trackio", folder.path()).unwrap().strict(true);
    let error = acc.init_trackers("demo", &(), trackers).unwrap_err();
    assert!(
        error.to_string().contains("trackio/demo.db: file is not a database"),
        "{error}"
    );
    assert_eq!(std::fs::read_to_string(path).unwrap(), text);
}
