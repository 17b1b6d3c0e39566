//! Reads the samples of a text file.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow};
use sconce_core::data::{DataError, JsonLines};

use super::sample::{Sample, SampleLine};

/// Reads a file as a list of samples: one for plain text, one a line for JSON lines (`.jsonl`, `.json`), one a row for Parquet.
///
/// # Errors
/// If the file cannot be read or is not UTF-8, or a line is no [`Sample`]; the error names file and line.
pub(super) fn read_samples(path: &Path) -> Result<Vec<Sample>> {
    let of_lines = |lines: Result<Vec<SampleLine>, DataError>| -> Result<Vec<Sample>> {
        let lines = lines.map_err(|error| anyhow!(error))?;
        Ok(lines.into_iter().map(|line| line.0).collect())
    };
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("jsonl" | "json") => of_lines(JsonLines::open([path]).and_then(|lines| lines.read_all())),
        Some("parquet") => of_lines(read_parquet(path)),
        _ => {
            let text = fs::read_to_string(path)
                .with_context(|| format!("{}: cannot be read, expected UTF-8 text or JSON lines", path.display()))?;
            Ok(vec![Sample::Text(text)])
        }
    }
}

#[cfg(feature = "parquet")]
fn read_parquet(path: &Path) -> Result<Vec<SampleLine>, DataError> {
    sconce_core::data::ParquetRows::open([path], &[])?.read_all()
}

#[cfg(not(feature = "parquet"))]
fn read_parquet(path: &Path) -> Result<Vec<SampleLine>, DataError> {
    let path = path.display();
    Err(
        format!("{path}: this program is built without Parquet; build it with --features parquet, or give JSON lines")
            .into(),
    )
}
