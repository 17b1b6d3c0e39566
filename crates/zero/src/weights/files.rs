//! Weights in one or several safetensors files.

use super::mapped_file::MappedFile;
use crate::{Error, Result};
use candle_core::Shape;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// An opened set of safetensors files; cheap to clone.
#[derive(Debug, Clone)]
pub struct WeightFiles {
    files: Arc<Vec<MappedFile>>,
    /// File number and shape by tensor name.
    tensors: Arc<BTreeMap<String, (usize, Vec<usize>)>>,
}

impl WeightFiles {
    /// Maps the files and reads their headers.
    ///
    /// # Errors
    /// [`Error::WeightFile`] when a file cannot be read, is truncated or malformed, or when two files have a tensor of
    /// one name.
    pub fn open(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let files = paths
            .iter()
            .map(|path| MappedFile::open(path.as_ref()))
            .collect::<Result<Vec<_>>>()?;
        let mut tensors: BTreeMap<String, (usize, Vec<usize>)> = BTreeMap::new();
        for (number, file) in files.iter().enumerate() {
            for (name, shape) in file.shapes() {
                if let Some((other, _)) = tensors.get(&name) {
                    let reason = format!(
                        "tensor {name:?} is also in {}; remove one",
                        files[*other].path.display()
                    );
                    return Err(Error::WeightFile {
                        path: file.path.clone(),
                        reason,
                    });
                }
                tensors.insert(name, (number, shape));
            }
        }
        Ok(Self {
            files: Arc::new(files),
            tensors: Arc::new(tensors),
        })
    }

    /// Returns the names of all tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns names and shapes of all tensors, in order of name.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.tensors
            .iter()
            .map(|(name, (_, shape))| (name.as_str(), shape.as_slice()))
    }

    /// Says whether a tensor exists.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub(crate) fn load_range(&self, name: &str, shape: &Shape, range: Range<usize>) -> Result<Vec<f32>> {
        let (file, found) = self.find(name)?;
        if found != shape.dims() {
            return Err(Error::WrongShape {
                path: file.path.clone(),
                name: name.into(),
                found: found.to_vec(),
                expected: shape.dims().to_vec(),
            });
        }
        file.load_range(name, range)
    }

    pub(crate) fn shape_of(&self, name: &str) -> Result<Shape> {
        Ok(Shape::from(self.find(name)?.1))
    }

    fn find(&self, name: &str) -> Result<(&MappedFile, &[usize])> {
        match self.tensors.get(name) {
            Some((number, shape)) => Ok((&self.files[*number], shape)),
            None => Err(Error::MissingTensor {
                name: name.into(),
                files: self
                    .files
                    .iter()
                    .map(|file| file.path.display().to_string())
                    .collect::<Vec<_>>()
                    .join(", "),
                nearest: self.nearest(name),
            }),
        }
    }

    /// Returns the most similar name, if a third of it or less would have to change.
    fn nearest(&self, name: &str) -> Option<String> {
        let best = self.names().map(|other| (edit_distance(name, other), other)).min()?;
        (best.0 * 3 <= name.len()).then(|| best.1.to_owned())
    }
}

/// Returns the number of single-character edits between two names (Levenshtein).
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::edit_distance;

    #[test]
    fn edit_distance_counts_insertions_deletions_and_replacements() {
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("same", "same"), 0);
    }
}
