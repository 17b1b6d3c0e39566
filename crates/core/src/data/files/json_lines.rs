//! JSON lines, a sample for each line.

use super::lines;
use crate::data::{DataError, IterableDataset, SampleIterator};
use serde::de::DeserializeOwned;
use std::marker::PhantomData;
use std::path::PathBuf;

/// The lines of files, each a JSON value that is a `T`; empty lines are left out.
///
/// ```
/// #[derive(Clone, serde::Deserialize)]
/// struct Document {
///     text: String,
/// }
///
/// # fn main() -> Result<(), sconce_core::data::DataError> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("documents.jsonl");
/// # std::fs::write(&path, "{\"text\": \"Once\"}\n{\"text\": \"upon\"}\n")?;
/// let documents = sconce_core::data::JsonLines::<Document>::open([path])?.read_all()?;
/// assert_eq!(documents[1].text, "upon");
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct JsonLines<T> {
    paths: Vec<PathBuf>,
    sample: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned + Clone + Send + 'static> JsonLines<T> {
    /// Reads these files, one after the other; they are read anew in every epoch.
    ///
    /// # Errors
    /// When one of them cannot be opened.
    pub fn open(paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Result<Self, DataError> {
        let paths = Vec::from_iter(paths.into_iter().map(Into::into));
        lines::check(&paths)?;
        let sample = PhantomData;
        Ok(Self { paths, sample })
    }

    /// Reads all samples into memory, which makes them a [`Dataset`](crate::Dataset) that can be shuffled, if they can be
    /// [collated](crate::data::Collate).
    ///
    /// # Errors
    /// A line that is no such value; the error names file and line.
    pub fn read_all(&self) -> Result<Vec<T>, DataError> {
        self.samples(0)?.collect()
    }
}

impl<T: DeserializeOwned + Clone + Send + 'static> IterableDataset for JsonLines<T> {
    type Sample = T;

    fn samples(&self, _: u64) -> Result<SampleIterator<T>, DataError> {
        let parse = |line: Result<lines::Line, DataError>| match line {
            Ok(line) if line.text.trim().is_empty() => None,
            Ok(line) => Some(serde_json::from_str(&line.text).map_err(|error| line.error(column_only(&error)))),
            Err(error) => Some(Err(error)),
        };
        Ok(Box::new(lines::read(self.paths.clone()).filter_map(parse)))
    }
}

/// The parser counts lines from 1 in what it is given, which is one.
fn column_only(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.replace(
        &format!("at line 1 column {}", error.column()),
        &format!("at column {}", error.column()),
    )
}
