//! A safetensors file, mapped into memory and validated.
//!
//! # Safety
//! A mapped file must not change under the mapping. Sconce publishes files by rename and never writes them again; that
//! nobody else truncates a weight file while it is read is the promise that every user of mapped weights makes.

#![allow(
    unsafe_code,
    reason = "mapping a file is the caller's promise that nobody changes it meanwhile"
)]

use crate::{Error, Result};
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A validated safetensors file.
pub(super) struct MappedFile {
    pub(super) path: PathBuf,
    tensors: MmapedSafetensors,
}

impl MappedFile {
    /// Maps a file and checks its header: lengths, offsets, overlaps and dtypes.
    pub(super) fn open(path: &Path) -> Result<Self> {
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
        Error::WeightFile {
            path: path.into(),
            reason: format!("not a readable safetensors file: {}", bare.trim()),
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
