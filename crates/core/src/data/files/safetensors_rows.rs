//! Rows of tensors in a safetensors file, such as ready tokens, read where they lie.

use crate::data::{DataError, Dataset};
use candle_core::{Device, Tensor};
use sconce_zero::MappedFile;
use std::path::Path;

/// Tensors of a safetensors file whose rows are the samples; a batch is the same rows of each.
///
/// The file is mapped, and only the rows of a batch are read: it may be larger than the memory. Nobody may change it
/// meanwhile.
#[derive(Debug)]
pub struct SafetensorsRows {
    file: MappedFile,
    /// Name, and shape of a row.
    tensors: Vec<(String, Vec<usize>)>,
    rows: usize,
}

impl SafetensorsRows {
    /// Opens a file for the tensors of these names; rows are counted over the first `leading` dimensions, which must be
    /// the same for all: with 1 a tensor \[rows, ..\] has `rows` samples, with 2 one of \[steps, batch, ..\] has
    /// steps * batch.
    ///
    /// # Errors
    /// A file that cannot be read, is truncated or malformed; a tensor that is not there, or has other rows than the
    /// first. The error names file and tensor.
    pub fn open(path: impl AsRef<Path>, names: &[&str], leading: usize) -> Result<Self, DataError> {
        let path = path.as_ref();
        let file = MappedFile::open(path)?;
        let refuse = |reason: String| DataError::from(format!("{}: {reason}", path.display()));
        let mut tensors = Vec::new();
        let mut common: Option<Vec<usize>> = None;
        for name in names {
            let shape = file.shape(name)?;
            let Some((rows, row)) = shape.split_at_checked(leading.max(1)) else {
                let reason = format!("tensor {name:?} has shape {shape:?}; expected at least {leading} dimensions");
                return Err(refuse(reason));
            };
            let expected = common.get_or_insert_with(|| rows.to_vec());
            if rows != expected {
                let first = names[0];
                let reason = format!(
                    "tensor {name:?} has shape {shape:?}; expected it to begin as {first:?}, with {expected:?}"
                );
                return Err(refuse(reason));
            }
            tensors.push((name.to_string(), row.to_vec()));
        }
        let Some(common) = common else {
            return Err(refuse("no tensors are named; expected at least one name".into()));
        };
        let rows = common.iter().product();
        Ok(Self { file, tensors, rows })
    }

    /// Returns the shape of one row of each tensor.
    pub fn row_shapes(&self) -> impl Iterator<Item = &[usize]> {
        self.tensors.iter().map(|(_, shape)| shape.as_slice())
    }
}

impl Dataset for SafetensorsRows {
    type Batch = Vec<Tensor>;

    fn len(&self) -> usize {
        self.rows
    }

    fn batch(&self, samples: &[usize], device: &Device) -> Result<Vec<Tensor>, DataError> {
        let rows = |(name, shape): &(String, Vec<usize>)| {
            let rows = self.file.rows(name, shape, samples)?;
            Ok(rows.to_device(device)?)
        };
        self.tensors.iter().map(rows).collect()
    }
}
