//! The weights of a model in one file, or in shards with an index, written tensor by tensor.

use super::ExportError;
use super::shards::deal;
use candle_core::DType;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

/// Longest header that readers accept.
const MOST_HEADER: usize = 100_000_000;

/// Whose names weight files have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Library {
    /// `model.safetensors`, or `model-00001-of-0000N.safetensors` and so on with `model.safetensors.index.json`.
    #[default]
    Transformers,
    /// The same with `diffusion_pytorch_model`, for the parts of a pipeline that diffusers itself has.
    Diffusers,
}

impl Library {
    /// Returns the name of the one file that has all tensors.
    pub fn single_file(self) -> String {
        format!("{}.safetensors", self.stem())
    }

    /// Returns the name of the index of several files.
    pub fn index_file(self) -> String {
        format!("{}.safetensors.index.json", self.stem())
    }

    fn stem(self) -> &'static str {
        match self {
            Self::Transformers => "model",
            Self::Diffusers => "diffusion_pytorch_model",
        }
    }
}

/// A tensor to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportedTensor {
    /// Its name in the file.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The type of its elements, which are written little endian, in row-major order.
    pub dtype: DType,
}

impl ExportedTensor {
    fn bytes(&self) -> Option<u64> {
        let sizes = self.shape.iter().copied().chain([self.dtype.size_in_bytes()]);
        let bytes = sizes.into_iter().try_fold(1usize, usize::checked_mul)?;
        u64::try_from(bytes).ok()
    }
}

/// Takes the bytes of a tensor, piece by piece.
pub(super) type Take<'a> = dyn FnMut(&[u8]) -> Result<(), ExportError> + 'a;

/// Writes `tensors` into `folder` under the names of `library`: to one file, or where that would have more than
/// `max_shard_size` bytes of tensors, to shards with an index. `values` is called once for each tensor, with its number, and
/// hands over its bytes. Returns the names of the files.
///
/// Tensors are dealt to files in the order given, by the rule of transformers; the metadata says `format: pt`, without which
/// transformers refuses a file.
///
/// # Errors
/// [`ExportError::Unusable`] when there are no tensors, one name comes twice, or a file cannot be written; failures of `values`.
pub fn write_weight_files(
    folder: &Path,
    tensors: &[ExportedTensor],
    library: Library,
    max_shard_size: u64,
    mut values: impl FnMut(usize, &mut Take<'_>) -> Result<(), ExportError>,
) -> Result<Vec<String>, ExportError> {
    if tensors.is_empty() {
        return Err(ExportError::unusable(folder, "no tensors were given for this folder"));
    }
    let mut names = BTreeSet::new();
    let mut sizes = Vec::new();
    for tensor in tensors {
        if tensor.name == "__metadata__" {
            let reason = "a tensor is called `__metadata__`, which is no tensor's name in safetensors; rename it";
            return Err(ExportError::unusable(folder, reason));
        }
        if !names.insert(&tensor.name) {
            let reason = format!("the tensor `{}` was given twice for this folder", tensor.name);
            return Err(ExportError::unusable(folder, reason));
        }
        let size = tensor.bytes().filter(|size| *size <= u64::MAX / tensors.len() as u64);
        let Some(size) = size else {
            let reason = format!("the tensor `{}` of shape {:?} is too large", tensor.name, tensor.shape);
            return Err(ExportError::unusable(folder, reason));
        };
        sizes.push(size);
    }
    let shards = deal(&sizes, max_shard_size);
    let mut files = Vec::new();
    let mut weight_map = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        let file = match shards.len() {
            1 => library.single_file(),
            count => format!("{}-{:05}-of-{count:05}.safetensors", library.stem(), number + 1),
        };
        write_file(&folder.join(&file), tensors, shard, &mut values)?;
        let in_file = shard.iter().map(|tensor| (&tensors[*tensor].name, file.clone()));
        weight_map.extend(in_file);
        files.push(file);
    }
    if shards.len() > 1 {
        let file = library.index_file();
        let index = json!({"metadata": {"total_size": sizes.iter().sum::<u64>()}, "weight_map": weight_map});
        let path = folder.join(&file);
        std::fs::write(&path, format!("{index:#}\n")).map_err(|error| ExportError::unusable(&path, error))?;
        files.push(file);
    }
    Ok(files)
}

/// Writes the tensors of these numbers to one file.
pub(super) fn write_file(
    path: &Path,
    tensors: &[ExportedTensor],
    numbers: &[usize],
    values: &mut impl FnMut(usize, &mut Take<'_>) -> Result<(), ExportError>,
) -> Result<(), ExportError> {
    let unusable = |error: &dyn std::fmt::Display| ExportError::unusable(path, error);
    // The larger elements first, so that all are aligned, then by name: the order of the safetensors crate.
    let dtype = |number: &usize| Dtype::from(tensors[*number].dtype);
    let mut numbers = numbers.to_vec();
    numbers.sort_by(|a, b| {
        let by_name = || tensors[*a].name.cmp(&tensors[*b].name);
        dtype(b).cmp(&dtype(a)).then_with(by_name)
    });
    let mut infos = Vec::new();
    let mut end = 0;
    for number in &numbers {
        let tensor = &tensors[*number];
        let start = end;
        end += tensor.bytes().expect("the sizes have been checked") as usize;
        let info = TensorInfo {
            dtype: dtype(number),
            shape: tensor.shape.clone(),
            data_offsets: (start, end),
        };
        infos.push((tensor.name.clone(), info));
    }
    let ends = Vec::from_iter(infos.iter().map(|(_, info)| info.data_offsets.1));
    let of_file = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(of_file), infos).map_err(|error| unusable(&error))?;
    let mut header = serde_json::to_string(&metadata)
        .map_err(|error| unusable(&error))?
        .into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    if header.len() > MOST_HEADER {
        let reason =
            "the names and shapes of so many tensors are more than a safetensors header holds: use smaller shards";
        return Err(unusable(&reason));
    }
    let file = File::create_new(path).map_err(|error| unusable(&error))?;
    let mut writer = BufWriter::with_capacity(1 << 20, file);
    let begun = writer.write_all(&(header.len() as u64).to_le_bytes());
    begun
        .and_then(|()| writer.write_all(&header))
        .map_err(|error| unusable(&error))?;
    let mut written = 0;
    for (number, end) in numbers.iter().zip(ends) {
        values(*number, &mut |bytes| {
            written += bytes.len();
            writer.write_all(bytes).map_err(|error| unusable(&error))
        })?;
        if written != end {
            let name = &tensors[*number].name;
            return Err(unusable(&format!(
                "the tensor `{name}` ended at byte {written}, expected {end}"
            )));
        }
    }
    writer.flush().map_err(|error| unusable(&error))
}
