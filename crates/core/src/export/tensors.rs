//! A program's own tensors as weight files.

use super::weight_files::Take;
use super::{ExportError, ExportedTensor, Library, write_weight_files};
use candle_core::{Device, Tensor};
use safetensors::View as _;
use std::collections::HashSet;
use std::path::Path;

/// Writes tensors, on any device, into a folder, as [`write_weight_files`] does. A tensor that comes under several names, as
/// tied weights do, is written under the first, as transformers does, which ties it again.
///
/// # Errors
/// As there, and failures of candle.
pub fn export_tensors(
    folder: &Path,
    tensors: &[(String, Tensor)],
    library: Library,
    max_shard_size: u64,
) -> Result<Vec<String>, ExportError> {
    let mut seen = HashSet::new();
    let mut names = HashSet::new();
    let mut kept = Vec::new();
    for (name, tensor) in tensors {
        // A name that comes twice is an error, also where the tensor is the same.
        let is_again = !names.insert(name);
        if seen.insert(tensor.id()) || is_again {
            kept.push((name, tensor));
        }
    }
    let plan = Vec::from_iter(kept.iter().map(|(name, tensor)| ExportedTensor {
        name: (*name).clone(),
        shape: tensor.dims().to_vec(),
        dtype: Tensor::dtype(tensor),
    }));
    write_weight_files(folder, &plan, library, max_shard_size, |number, take| {
        let (name, tensor) = kept[number];
        take_tensor(folder, name, tensor, take)
    })
}

/// Hands over the bytes of a tensor on any device.
pub(super) fn take_tensor(folder: &Path, name: &str, tensor: &Tensor, take: &mut Take<'_>) -> Result<(), ExportError> {
    // Copied to the host here, because the `View` of a candle tensor panics where such a copy fails.
    let tensor = tensor
        .to_device(&Device::Cpu)
        .map_err(|error| ExportError::unusable(folder, format!("the tensor `{name}`: {error}")))?;
    take(&tensor.data())
}
