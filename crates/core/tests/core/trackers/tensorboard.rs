//! Event files, read by a reader that shares nothing with the writer.

use super::checksum::checksum;
use super::files::PNG_HEAD;
use super::protobuf::{Field, Value, block, fields, get, inner};
use super::{alone, files_below};
use sconce_core::trackers::Trackers;
use serde_json::json;
use std::fs;

/// CRC-32C, masked as records have it.
fn masked(data: &[u8]) -> u32 {
    let crc = checksum(data.iter().copied(), 0x82f6_3b78);
    crc.rotate_left(17).wrapping_add(0xa282_ead8)
}

/// The data of all whole records; panics where length or data do not have their checksum.
fn records(mut file: &[u8]) -> Vec<Vec<u8>> {
    let mut records = Vec::new();
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    while file.len() >= 12 {
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        assert_eq!(number(&file[8..12]), masked(&file[..8]), "of the length");
        if file.len() < length + 16 {
            break;
        }
        let data = &file[12..12 + length];
        assert_eq!(number(&file[12 + length..16 + length]), masked(data), "of the data");
        records.push(data.to_vec());
        file = &file[16 + length..];
    }
    records
}

fn doubles(bytes: &[u8]) -> Vec<f64> {
    let numbers = bytes.chunks_exact(8);
    numbers
        .map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap()))
        .collect()
}

/// The values of an event's summary.
fn values(event: &[Field]) -> Vec<Vec<Field>> {
    let summary = inner(event, 5).into_iter();
    summary
        .map(|(number, value)| match value {
            Value::Block(bytes) if number == 1 => fields(&bytes),
            other => panic!("{other:?}"),
        })
        .collect()
}

/// Everything that can be logged, as the events of a file.
fn logged(folder: &std::path::Path) -> Vec<Vec<Field>> {
    let acc = alone();
    let trackers = Trackers::from_names("tensorboard", folder).unwrap().strict(true);
    acc.init_trackers("demo", &json!({"lr": 0.5, "model": {"name": "a|b"}}), trackers)
        .unwrap();
    acc.log(&[("loss", 2.5), ("train/lr", f64::NAN)], 300).unwrap();
    acc.log_text("note", "some *text*", 301).unwrap();
    acc.log_image("picture", PNG_HEAD, 302).unwrap();
    acc.log_histogram("weights", &[-1.0, 0.0, 0.1, 2.0, f64::INFINITY, f64::NAN], 303)
        .unwrap();
    acc.log_histogram("constant", &[3.0, 3.0], 304).unwrap();
    acc.log_histogram("nothing", &[f64::NAN], 305).unwrap();
    let files = files_below(folder);
    assert!(
        files.len() == 1 && files[0].to_string_lossy().starts_with("demo/events.out.tfevents."),
        "{files:?}"
    );
    // Not finished yet: what is logged can be read.
    let bytes = fs::read(folder.join(&files[0])).unwrap();
    records(&bytes).iter().map(|data| fields(data)).collect()
}

#[test]
fn an_event_file_has_its_version_the_parameters_and_every_kind_of_value() {
    let folder = tempfile::tempdir().unwrap();
    let events = logged(folder.path());
    assert_eq!(events.len(), 7);
    assert_eq!(block(&events[0], 3), b"brain.Event:2");
    for event in &events {
        assert!(matches!(get(event, 1), Value::Double(time) if *time > 1.6e9));
    }
    let steps = events[2..].iter().map(|event| get(event, 2).clone());
    assert_eq!(
        Vec::from_iter(steps),
        (300..305).map(Value::Integer).collect::<Vec<_>>()
    );

    let text = |value: &[Field]| {
        let tensor = inner(value, 8);
        assert_eq!(get(&tensor, 1), &Value::Integer(7), "DT_STRING");
        assert_eq!(inner(&inner(&tensor, 2), 2), [(1, Value::Integer(1))], "one element");
        assert_eq!(block(&inner(&inner(value, 9), 1), 1), b"text", "the plugin");
        String::from_utf8(block(&tensor, 8)).unwrap()
    };
    let parameters = &values(&events[1])[0];
    assert_eq!(block(parameters, 1), b"hparams/text_summary");
    let table = text(parameters);
    assert!(
        table.contains("| lr | 0.5 |\n") && table.contains("| model/name | a\\|b |\n"),
        "{table}"
    );

    let scalars = values(&events[2]);
    assert_eq!(block(&scalars[0], 1), b"loss");
    assert_eq!(get(&scalars[0], 2), &Value::Float(2.5));
    assert_eq!(block(&scalars[1], 1), b"train/lr");
    assert!(matches!(get(&scalars[1], 2), Value::Float(value) if value.is_nan()));

    assert_eq!(text(&values(&events[3])[0]), "some *text*");
    let image = inner(&values(&events[4])[0], 4);
    let [height, width] = [1, 2].map(|number| get(&image, number).clone());
    assert_eq!([height, width], [Value::Integer(2), Value::Integer(3)]);
    assert_eq!(block(&image, 4), PNG_HEAD);
}

#[test]
fn a_histogram_counts_every_finite_value_once() {
    let folder = tempfile::tempdir().unwrap();
    let events = logged(folder.path());
    let histogram = |event: usize| {
        let value = values(&events[event]).remove(0);
        inner(&value, 5)
    };
    let weights = histogram(5);
    let facts = [1, 2, 3, 4, 5].map(|number| match get(&weights, number) {
        Value::Double(value) => *value,
        other => panic!("{other:?}"),
    });
    // Least, largest, number, sum, sum of squares.
    for (found, expected) in facts.iter().zip([-1.0, 2.0, 4.0, 1.1, 5.01]) {
        assert!((found - expected).abs() < 1e-12, "{facts:?}");
    }
    let (limits, counts) = (doubles(&block(&weights, 6)), doubles(&block(&weights, 7)));
    assert!(limits.len() == counts.len() && limits.is_sorted() && limits.last() == Some(&2.0));
    for (value, times) in [(-1.0, 1.0), (0.0, 1.0), (0.1, 1.0), (2.0, 1.0)] {
        // A value on a border may lie on either side of it.
        let near = limits
            .iter()
            .zip(&counts)
            .filter(|(limit, _)| (*limit - value).abs() <= 0.1 + 1e-9);
        assert!(
            near.map(|(_, count)| count).sum::<f64>() >= times,
            "{value}: {limits:?} {counts:?}"
        );
    }
    assert_eq!(counts.iter().sum::<f64>(), 4.0);
    let constant = histogram(6);
    assert_eq!(doubles(&block(&constant, 6)), [3.0]);
    assert_eq!(doubles(&block(&constant, 7)), [2.0]);
}
