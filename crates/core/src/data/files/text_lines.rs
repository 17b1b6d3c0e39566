//! Text files, a sample for each line.

use super::lines;
use crate::data::{DataError, IterableDataset, SampleIterator};
use std::path::PathBuf;

/// The lines of text files, without line ends; empty lines are samples too.
#[derive(Debug, Clone)]
pub struct TextLines {
    paths: Vec<PathBuf>,
}

impl TextLines {
    /// Reads these files, one after the other; they are read anew in every epoch.
    ///
    /// # Errors
    /// When one of them cannot be opened.
    pub fn open(paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Result<Self, DataError> {
        let paths = Vec::from_iter(paths.into_iter().map(Into::into));
        lines::check(&paths)?;
        Ok(Self { paths })
    }

    /// Reads all lines into memory, which makes them a [`Dataset`](crate::Dataset) that can be shuffled.
    ///
    /// # Errors
    /// What is no UTF-8 text; the error names file and line.
    pub fn read_all(&self) -> Result<Vec<String>, DataError> {
        self.samples(0)?.collect()
    }
}

impl IterableDataset for TextLines {
    type Sample = String;

    fn samples(&self, _: u64) -> Result<SampleIterator<String>, DataError> {
        Ok(Box::new(lines::read(self.paths.clone()).map(|line| Ok(line?.text))))
    }
}
