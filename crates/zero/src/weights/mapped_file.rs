//! A safetensors file, mapped into memory and validated.
//!
//! # Safety
//! A mapped file must not change under the mapping. Sconce publishes files by rename and never writes them again; that
//! nobody else truncates a weight file while it is read is the promise that every user of mapped weights makes.

#![allow(
    unsafe_code,
    reason = "mapping a file is the caller's promise that nobody changes it meanwhile"
)]

use super::ForeignWeights;
use crate::{Error, Result};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A validated safetensors file, mapped into memory; nobody may change it meanwhile.
pub struct MappedFile {
    pub(super) path: PathBuf,
    tensors: MmapedSafetensors,
}

impl MappedFile {
    /// Maps a file and checks its header: lengths, offsets, overlaps and dtypes.
    ///
    /// # Errors
    /// [`Error::WeightFile`] when the file cannot be read, is truncated or malformed.
    pub fn open(path: &Path) -> Result<Self> {
        // SAFETY: the file is only read, and the module page says who promises that it stays as it is.
        let tensors = unsafe { MmapedSafetensors::new(path) };
        let tensors = tensors.map_err(|error| Self::error(path, &error))?;
        Ok(Self {
            path: path.into(),
            tensors,
        })
    }

    /// Returns names and shapes.
    pub(super) fn shapes(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        self.tensors
            .tensors()
            .into_iter()
            .map(|(name, view)| (name, view.shape().to_vec()))
    }

    /// Returns the shape of a tensor.
    ///
    /// # Errors
    /// [`Error::WeightFile`] when there is no such tensor; the error names those that are there.
    pub fn shape(&self, name: &str) -> Result<Vec<usize>> {
        let found = self.shapes().find(|(other, _)| other == name);
        found.map(|(_, shape)| shape).ok_or_else(|| {
            let mut names: Vec<_> = self.shapes().map(|(name, _)| name).collect();
            names.sort_unstable();
            Error::WeightFile {
                path: self.path.clone(),
                reason: format!("has no tensor {name:?}; it has {}", names.join(", ")),
            }
        })
    }

    /// Reads rows of a tensor, which is taken as rows of shape `row` one after the other, in the order of `numbers`; no
    /// other part of the file is touched. The result has shape \[numbers, row..\] and the tensor's dtype, on the CPU.
    ///
    /// # Errors
    /// [`Error::WeightFile`] when there is no such tensor or row, or candle does not have its dtype.
    pub fn rows(&self, name: &str, row: &[usize], numbers: &[usize]) -> Result<Tensor> {
        let read = || -> candle_core::Result<Tensor> {
            let view = self.tensors.get(name)?;
            let dtype = DType::try_from(view.dtype())?;
            let bytes_of_row = row.iter().product::<usize>() * dtype.size_in_bytes();
            let mut bytes = Vec::with_capacity(numbers.len() * bytes_of_row);
            for number in numbers {
                let range = number
                    .checked_mul(bytes_of_row)
                    .and_then(|start| view.data().get(start..start.checked_add(bytes_of_row)?));
                let Some(of_row) = range else {
                    candle_core::bail!(
                        "tensor {name:?} of shape {:?} has no row {number} of {row:?}",
                        view.shape()
                    );
                };
                bytes.extend_from_slice(of_row);
            }
            let shape = [&[numbers.len()], row].concat();
            Tensor::from_raw_buffer(&bytes, dtype, &shape, &Device::Cpu)
        };
        read().map_err(|error| Self::error(&self.path, &error))
    }

    /// Reads elements `range` of a tensor, widened or narrowed to f32; no other part of the file is touched.
    pub(super) fn load_range(&self, name: &str, range: Range<usize>) -> Result<Vec<f32>> {
        let read = || -> candle_core::Result<Vec<f32>> {
            let view = self.tensors.get(name)?;
            let dtype = DType::try_from(view.dtype())?;
            if !(dtype.is_float() || dtype.is_int()) || dtype.size_in_bytes() == 0 {
                candle_core::bail!(
                    "tensor {name:?} is {}, which is no number type that trains",
                    dtype.as_str()
                );
            }
            let size = dtype.size_in_bytes();
            let bytes = &view.data()[range.start * size..range.end * size];
            let elements = Tensor::from_raw_buffer(bytes, dtype, &[range.len()], &Device::Cpu)?;
            elements.to_dtype(DType::F32)?.to_vec1()
        };
        read().map_err(|error| Self::error(&self.path, &error))
    }

    fn error(path: &Path, error: &candle_core::Error) -> Error {
        let text = error.to_string();
        // candle prefixes the path itself, and may append a backtrace.
        let first = text.lines().next().unwrap_or_default();
        let bare = first.replace(&format!("path: {:?}", path.to_string_lossy()), "");
        let reason = match ForeignWeights::find(path) {
            Some(foreign) => foreign.to_string(),
            None => format!("not a readable safetensors file: {}", bare.trim()),
        };
        Error::WeightFile {
            path: path.into(),
            reason,
        }
    }
}

impl std::fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MappedFile")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}
