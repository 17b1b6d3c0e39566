//! Parquet files, a sample for each row.

use crate::data::{DataError, IterableDataset, SampleIterator};
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::reader::RowIter;
use parquet::schema::types::Type;
use serde::de::DeserializeOwned;
use std::fs::File;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The rows of Parquet files, each of which, as a JSON object, is a `T`. Uncompressed, Snappy and gzip.
#[derive(Debug, Clone)]
pub struct ParquetRows<T> {
    paths: Vec<PathBuf>,
    /// Top-level columns that are read; all where there are none.
    columns: Vec<String>,
    rows: usize,
    sample: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned + Clone + Send + 'static> ParquetRows<T> {
    /// Reads the named columns, or all where none are, of these files, one after the other.
    ///
    /// # Errors
    /// A file that cannot be read, is malformed or has no such column; the error names it.
    pub fn open(paths: impl IntoIterator<Item = impl Into<PathBuf>>, columns: &[&str]) -> Result<Self, DataError> {
        let mut opened = Self {
            paths: Vec::from_iter(paths.into_iter().map(Into::into)),
            columns: columns.iter().map(ToString::to_string).collect(),
            rows: 0,
            sample: PhantomData,
        };
        for path in &opened.paths {
            let reader = open(path)?;
            projection(path, &reader, &opened.columns)?;
            opened.rows += usize::try_from(reader.metadata().file_metadata().num_rows())
                .map_err(|_| format!("{}: has a negative number of rows", path.display()))?;
        }
        Ok(opened)
    }

    /// Reads all rows into memory, which makes them a [`Dataset`](crate::Dataset) that can be shuffled, if they can be
    /// [collated](crate::data::Collate).
    ///
    /// # Errors
    /// A row that is no `T`; the error names file and row.
    pub fn read_all(&self) -> Result<Vec<T>, DataError> {
        self.samples(0)?.collect()
    }
}

impl<T: DeserializeOwned + Clone + Send + 'static> IterableDataset for ParquetRows<T> {
    type Sample = T;

    fn samples(&self, _: u64) -> Result<SampleIterator<T>, DataError> {
        let columns = self.columns.clone();
        let files = self.paths.clone().into_iter();
        let rows = files.flat_map(move |path| match rows::<T>(&path, &columns) {
            Ok(rows) => rows,
            Err(error) => Box::new(std::iter::once(Err(error))),
        });
        Ok(Box::new(rows))
    }

    fn length(&self) -> Option<usize> {
        Some(self.rows)
    }
}

fn open(path: &Path) -> Result<SerializedFileReader<File>, DataError> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: cannot be read as Parquet: {error}", path.display());
    let file = File::open(path).map_err(|error| failed(&error))?;
    Ok(guarded(|| SerializedFileReader::new(file))
        .ok_or_else(|| failed(&"malformed"))?
        .map_err(|error| failed(&error))?)
}

/// Returns the part of the schema that is read, `None` for all of it.
fn projection(path: &Path, reader: &SerializedFileReader<File>, columns: &[String]) -> Result<Option<Type>, DataError> {
    if columns.is_empty() {
        return Ok(None);
    }
    let schema = reader.metadata().file_metadata().schema();
    let find = |name: &String| {
        let found = schema.get_fields().iter().find(|field| field.name() == name);
        found.cloned().ok_or_else(|| {
            let there = Vec::from_iter(schema.get_fields().iter().map(|field| field.name())).join(", ");
            format!("{}: has no column {name:?}; it has {there}", path.display())
        })
    };
    let fields: Vec<Arc<Type>> = columns.iter().map(find).collect::<Result<_, _>>()?;
    Ok(Some(
        Type::group_type_builder(schema.name()).with_fields(fields).build()?,
    ))
}

fn rows<T: DeserializeOwned + 'static>(path: &Path, columns: &[String]) -> Result<SampleIterator<T>, DataError> {
    let reader = open(path)?;
    let projection = projection(path, &reader, columns)?;
    let mut rows = RowIter::from_file_into(Box::new(reader)).project(projection)?;
    let path = path.to_path_buf();
    let mut number = 0;
    let mut ended = false;
    Ok(Box::new(std::iter::from_fn(move || {
        if ended {
            return None;
        }
        let failed = |error: &dyn std::fmt::Display| format!("{}, row {number}: {error}", path.display()).into();
        let row = match guarded(|| rows.next()) {
            Some(row) => row?,
            None => {
                ended = true;
                return Some(Err(failed(&"malformed data")));
            }
        };
        let sample = match row {
            Ok(row) => serde_json::from_value(row.to_json_value()).map_err(|error| failed(&error)),
            Err(error) => {
                ended = true;
                Err(failed(&error))
            }
        };
        number += 1;
        Some(sample)
    })))
}

/// Does work in which the decoder may panic on a malformed file; `None` where it does.
fn guarded<R>(work: impl FnOnce() -> R) -> Option<R> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
