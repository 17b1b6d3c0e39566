//! Reading Parquet files, one of which pyarrow wrote.

use super::accelerator;
use sconce_collectives::single;
use sconce_core::data::ParquetRows;
use sconce_core::{DataLoader, IterableDataset as _};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, PartialEq, serde::Deserialize)]
struct Row {
    text: Option<String>,
    number: i64,
    tokens: Vec<i64>,
    score: f32,
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/rows.parquet")
}

#[test]
fn rows_are_those_that_pyarrow_wrote_whole_or_some_columns_of_them() {
    let row = |text: Option<&str>, number, tokens: &[i64], score| Row {
        text: text.map(Into::into),
        number,
        tokens: tokens.to_vec(),
        score,
    };
    let expected = [
        row(Some("one"), 1, &[1, 2], 0.5),
        row(Some(""), 2, &[], 1.5),
        row(Some("three"), 3, &[3], -2.0),
        row(None, 4, &[4, 5, 6], 0.0),
        row(Some("fünf"), 5, &[7], 3.25),
    ];
    let rows = ParquetRows::<Row>::open([file(), file()], &[]).unwrap();
    assert_eq!(rows.length(), Some(10));
    assert_eq!(rows.read_all().unwrap(), [expected.clone(), expected].concat());
    let numbers = ParquetRows::<serde_json::Value>::open([file()], &["number"]).unwrap();
    assert_eq!(numbers.read_all().unwrap()[4], serde_json::json!({"number": 5}));
    let acc = accelerator(single());
    let loader = DataLoader::stream_with(rows, 4, |rows, _| Ok(rows.len()));
    let mut loader = acc.prepare_loader(loader).unwrap();
    assert_eq!(loader.batches(), Some(3));
    let sizes: Vec<usize> = (&mut loader).into_iter().map(Result::unwrap).collect();
    assert_eq!(sizes, [4, 4, 2]);
}

#[test]
fn rows_of_another_form_missing_columns_and_spoilt_files_are_errors_that_name_file_and_row() {
    let text = ParquetRows::<Row>::open([file()], &["texts"]).unwrap_err().to_string();
    assert!(
        text.contains("rows.parquet: has no column \"texts\"; it has text, number"),
        "{text}"
    );
    #[derive(Debug, Clone, serde::Deserialize)]
    #[allow(dead_code, reason = "what is read is not used")]
    struct Text {
        text: String,
    }
    let text = ParquetRows::<Text>::open([file()], &[])
        .unwrap()
        .read_all()
        .unwrap_err()
        .to_string();
    assert!(text.contains("rows.parquet, row 3: invalid type: null"), "{text}");

    let folder = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(file()).unwrap();
    let path = folder.path().join("spoilt.parquet");
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        ParquetRows::<Row>::open([&path], &[]).and_then(|rows| rows.read_all())
    };
    assert_eq!(read(&bytes).unwrap().len(), 5);
    for length in [0, 3, bytes.len() / 2, bytes.len() - 1] {
        let text = read(&bytes[..length]).unwrap_err().to_string();
        assert!(text.contains("spoilt.parquet"), "{text}");
    }
    // Data may be spoilt so that it still reads, but whatever it is, it ends, and errors name the file.
    for at in (0..bytes.len()).step_by(13) {
        let mut spoilt = bytes.clone();
        spoilt[at] ^= 0xff;
        if let Err(error) = read(&spoilt) {
            assert!(error.to_string().contains("spoilt.parquet"), "{error}");
        }
    }
}
