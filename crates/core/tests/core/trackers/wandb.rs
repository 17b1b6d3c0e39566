//! Offline runs of Weights & Biases, beside one that its own client wrote (`fixtures/wandb`).

use super::checksum::checksum;
use super::protobuf::{Field, Value, block, fields, get, inner};
use super::{alone, files_below};
use sconce_core::trackers::Trackers;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const CRC_32: u32 = 0xedb8_8320;

/// The data of all records; panics where a file is not framed as LevelDB's logs are.
fn records(file: &[u8]) -> Vec<Vec<u8>> {
    assert_eq!(&file[..7], b":W&B\xe1\xbe\0");
    let (mut at, mut records, mut open) = (7, Vec::new(), None::<Vec<u8>>);
    while at < file.len() {
        let left = 32768 - at % 32768;
        if left < 7 {
            assert!(file[at..at + left].iter().all(|byte| *byte == 0));
            at += left;
            continue;
        }
        let length = usize::from(u16::from_le_bytes([file[at + 4], file[at + 5]]));
        assert!(7 + length <= left, "a piece crosses a block's end");
        let (kind, data) = (file[at + 6], &file[at + 7..at + 7 + length]);
        let stored = u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
        assert_eq!(stored, checksum([kind].into_iter().chain(data.iter().copied()), CRC_32));
        at += 7 + length;
        match kind {
            1 => records.push(data.to_vec()),
            2 => open = Some(data.to_vec()),
            3 | 4 => open.as_mut().expect("a first piece").extend(data),
            other => panic!("a piece of type {other}"),
        }
        if kind == 4 {
            records.extend(open.take());
        }
    }
    assert!(open.is_none(), "a record without an end");
    records
}

/// What a run comes to: values of each step and the latest ones by their names, with `/` within nested ones, as JSON.
#[derive(Debug, Default, PartialEq)]
struct Decoded {
    id: String,
    project: String,
    config: BTreeMap<String, String>,
    rows: Vec<(u64, BTreeMap<String, String>)>,
    summary: BTreeMap<String, String>,
    files: Vec<String>,
    has_ended: bool,
}

fn text(message: &[Field], number: u64) -> String {
    String::from_utf8(block(message, number)).unwrap()
}

/// The items of an update, but those that say when it was, and what only the client knows.
fn items(update: &[Field], within: u64) -> BTreeMap<String, String> {
    let mut items = BTreeMap::new();
    for (number, value) in update {
        let Value::Block(bytes) = value else {
            panic!("{value:?}")
        };
        if *number != within {
            continue;
        }
        let item = fields(bytes);
        let names = item.iter().filter_map(|(number, value)| match value {
            Value::Block(name) if [1, 2].contains(number) && !name.is_empty() => Some(String::from_utf8_lossy(name)),
            _ => None,
        });
        let name = Vec::from_iter(names).join("/");
        if !name.starts_with("_wandb") && !["_timestamp", "_runtime"].contains(&name.as_str()) {
            items.insert(name, text(&item, 16));
        }
    }
    items
}

fn decoded(path: &Path) -> Decoded {
    let mut run = Decoded::default();
    for (index, record) in records(&fs::read(path).unwrap()).iter().enumerate() {
        let record = fields(record);
        assert_eq!(
            get(&record, 1),
            &Value::Integer(index as u64 + 1),
            "records are numbered"
        );
        for (kind, value) in &record {
            let Value::Block(bytes) = value else { continue };
            let message = fields(bytes);
            match kind {
                2 => {
                    let step = inner(&message, 2);
                    let step = step.first().map_or(0, |(_, value)| match value {
                        Value::Integer(step) => *step,
                        other => panic!("{other:?}"),
                    });
                    run.rows.push((step, items(&message, 1)));
                }
                3 => run.summary.extend(items(&message, 1)),
                6 => run.files.push(text(&inner(&message, 1), 1)),
                17 => {
                    (run.id, run.project) = (text(&message, 1), text(&message, 3));
                    run.config = items(&inner(&message, 4), 1);
                }
                18 => run.has_ended = true,
                _ => {}
            }
        }
    }
    run
}

fn fixtures() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/wandb")
}

/// The one log below a folder.
fn log_below(folder: &Path) -> std::path::PathBuf {
    let files = files_below(folder);
    let mut logs = files
        .iter()
        .filter(|path| path.extension().is_some_and(|end| end == "wandb"));
    let log = logs.next().unwrap();
    assert_eq!(logs.next(), None);
    folder.join(log)
}

#[test]
fn a_run_says_what_the_client_of_weights_and_biases_says() {
    let folder = tempfile::tempdir().unwrap();
    let picture = fs::read(fixtures().join("picture.png")).unwrap();
    let acc = alone();
    let trackers = Trackers::from_names("wandb", folder.path()).unwrap().strict(true);
    acc.init_trackers("demo", &json!({"lr": 0.5, "model": {"layers": 2}}), trackers)
        .unwrap();
    acc.log(&[("loss", 2.5), ("train/lr", 1e-3)], 0).unwrap();
    acc.log(&[("loss", f64::NAN), ("most", f64::INFINITY)], 1).unwrap();
    acc.log(&[("loss", 1.5)], 2).unwrap();
    acc.log(&[("loss", 1.25)], 2).unwrap();
    acc.log_text("note", "some\n\"text\"", 2).unwrap();
    acc.log_histogram("weights", &[1.0, 2.0, 3.0, 3.0, f64::NAN], 3)
        .unwrap();
    acc.log_histogram("same", &[2.0, 2.0], 4).unwrap();
    acc.log_image("a/picture", &picture, 7).unwrap();
    // The service has no place for it.
    acc.log(&[("late", 1.0)], 6).unwrap();
    acc.end_training().unwrap();

    let (mut ours, mut theirs) = (
        decoded(&log_below(folder.path())),
        decoded(&fixtures().join("run.wandb")),
    );
    let id = std::mem::take(&mut ours.id);
    assert!(
        id.len() == 8
            && id
                .bytes()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
    );
    let log = log_below(folder.path());
    assert_eq!(log.file_name().unwrap(), format!("run-{id}.wandb").as_str());
    let run_folder = log.parent().unwrap();
    let name = run_folder.file_name().unwrap().to_string_lossy();
    assert!(
        name.starts_with("offline-run-2") && name.ends_with(&format!("-{id}")),
        "{name}"
    );

    // What the client numbers by itself is named by the step here; the package list is Python's.
    theirs.id.clear();
    theirs.files.retain(|path| path != "requirements.txt");
    let path = ours.files[0].clone();
    assert!(
        path.starts_with("media/images/a/picture_7_0bf7e49230407e1a478f.png"),
        "{path}"
    );
    let their_path = theirs.files[0].clone();
    for values in [&mut theirs.summary, &mut theirs.rows.last_mut().unwrap().1] {
        assert_eq!(values["a/picture/path"], format!("{their_path:?}"));
        values.insert("a/picture/path".into(), format!("{path:?}"));
    }
    theirs.files[0] = path.clone();
    assert_eq!(fs::read(run_folder.join("files").join(path)).unwrap(), picture);
    // Numbers are the same, however they are spelt.
    for run in [&mut ours, &mut theirs] {
        for values in [&mut run.summary]
            .into_iter()
            .chain(run.rows.iter_mut().map(|(_, values)| values))
        {
            for value in values.values_mut() {
                *value = value.replace(".0,", ",").replace(".0]", "]");
            }
        }
    }
    assert_eq!(ours, theirs);
}

#[test]
fn a_run_can_be_read_while_it_goes_on_and_after_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let acc = alone();
    let trackers = Trackers::from_names("wandb", folder.path()).unwrap().strict(true);
    acc.init_trackers("demo", &(), trackers).unwrap();
    let log = log_below(folder.path());
    assert_eq!(decoded(&log).rows, []);
    // Rows of all lengths meet the ends of several blocks in every way; the longest have pieces of their own kind.
    let mut expected = Vec::new();
    for step in 0..400 {
        let length = if step % 97 == 96 {
            70_000
        } else {
            step as usize * 7 % 300
        };
        let text = "x".repeat(length);
        acc.log_text("text", &text, step).unwrap();
        // Shorter than what it replaces.
        acc.log_text("text", &text[length / 2..], step).unwrap();
        let row = [
            ("_step".to_owned(), step.to_string()),
            ("text".into(), format!("{:?}", &text[length / 2..])),
        ];
        expected.push((step, BTreeMap::from(row)));
        if step % 40 == 0 || step % 97 == 96 {
            assert_eq!(decoded(&log).rows, expected);
        }
    }
    let read = decoded(&log);
    assert!(read.rows == expected && !read.has_ended);
    assert!(fs::metadata(&log).unwrap().len() > 8 * 32768);
    acc.end_training().unwrap();
    assert!(decoded(&log).has_ended);
}
