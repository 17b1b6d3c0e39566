//! A model in a checkpoint as a folder of HuggingFace's weights files.

use super::index::BLOCK;
use super::opened::{Checkpoint, SavedModel, SavedTensor};
use super::{CheckpointError, array_file::ArrayFiles, index::BoxEntry};
use crate::export::{
    ExportError, ExportedTensor, Library, MAX_SHARD_SIZE, NewFolder, PeftConfig, export_peft, write_weight_files,
};
use crate::nn::is_adapter_name;
use candle_core::{DType, Device, Tensor};
use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};
use sconce_zero::StatePiece;
use std::path::Path;

/// Elements that are converted at a time: whole blocks of both widths.
const PIECE: usize = BLOCK / 2;

/// How weights are exported.
#[derive(Debug, Clone)]
pub struct ExportOptions {
    /// The model's number, in the order in which accelerators were made.
    pub model: usize,
    /// Whose names the files get.
    pub library: Library,
    /// The most bytes of tensors in a file; larger tensors are files of their own.
    pub max_shard_size: u64,
    /// The type that values get, rounded to nearest: f32, bf16 or f16; `None` keeps that of the checkpoint, f32 where parameters were
    /// trained.
    pub dtype: Option<DType>,
    /// Leaves out frozen parameters.
    pub trained_only: bool,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self {
            model: 0,
            library: Library::Transformers,
            max_shard_size: MAX_SHARD_SIZE,
            dtype: None,
            trained_only: false,
        }
    }
}

/// What was exported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// The files' names.
    pub files: Vec<String>,
    /// How many tensors they have.
    pub tensors: usize,
}

impl Checkpoint {
    /// Writes the values of a model's parameters to a new folder: to one file, or shards with an index. The folder appears
    /// whole or not at all, and has the same bytes whatever ranks and strategies saved. Holds a few mebibytes at a time.
    ///
    /// # Errors
    /// [`ExportError`] when there is no such model, `folder` is not empty, values are damaged or do not fit the dtype, or a
    /// file cannot be written.
    pub fn export_weights(
        &mut self,
        folder: impl AsRef<Path>,
        options: &ExportOptions,
    ) -> Result<Exported, ExportError> {
        let model = self.model(options.model)?;
        let lacks = |reason: String| self.lacks(reason);
        let steps = &self.index.models[options.model].state.steps;
        if options.trained_only && steps.is_empty() {
            let reason = "it does not say which parameters were trained: candle's optimizers keep that to themselves";
            return Err(lacks(reason.into()).into());
        }
        let mut tensors = Vec::new();
        let wanted = |parameter: &&SavedTensor| !options.trained_only || steps.contains_key(&parameter.name);
        for parameter in model.parameters.iter().filter(wanted) {
            let dtype = match (options.dtype, saved_dtype(parameter)) {
                (Some(dtype @ (DType::F32 | DType::BF16 | DType::F16)), Some(_)) => dtype,
                (None, Some(dtype)) => dtype,
                (Some(dtype), Some(_)) => {
                    let reason = format!("weights are f32, bf16 or f16; {dtype:?} is asked for");
                    return Err(lacks(reason).into());
                }
                (_, None) => return Err(lacks(format!("{:?} has no values", parameter.name)).into()),
            };
            tensors.push(ExportedTensor {
                name: parameter.name.clone(),
                shape: parameter.shape.clone(),
                dtype,
            });
        }
        let new = NewFolder::create(folder.as_ref())?;
        let (files, parameters) = (&mut self.files, &self.index.models[options.model].parameters);
        let files = write_weight_files(
            new.path(),
            &tensors,
            options.library,
            options.max_shard_size,
            |number, take| {
                let tensor = &tensors[number];
                for one in &parameters[&tensor.name].arrays[StatePiece::VALUE] {
                    export_box(files, one, tensor, take)?;
                }
                Ok(())
            },
        )?;
        new.finish()?;
        Ok(Exported {
            files,
            tensors: tensors.len(),
        })
    }
}

impl Checkpoint {
    /// Writes the adapters ([`LoraLinear`](crate::nn::LoraLinear)) of a model to a new folder of PEFT's, in f32: see
    /// [`export_peft`]. Returns how many tensors it has.
    ///
    /// # Errors
    /// [`ExportError`] when there is no such model or it has no adapters, values are damaged, and as [`export_peft`].
    pub fn export_adapters(
        &mut self,
        folder: impl AsRef<Path>,
        model: usize,
        config: &PeftConfig,
    ) -> Result<usize, ExportError> {
        self.model(model)?;
        let mut tensors = Vec::new();
        for (name, entry) in &self.index.models[model].parameters {
            let boxes = entry.arrays.get(StatePiece::VALUE).filter(|_| is_adapter_name(name));
            let Some(boxes) = boxes else { continue };
            let mut values = vec![0.0; entry.shape.iter().product()];
            self.files.read(boxes, 0..values.len(), &mut values)?;
            let tensor = Tensor::from_vec(values, entry.shape.as_slice(), &Device::Cpu);
            let tensor = tensor.map_err(|error| self.lacks(format!("{name}: {error}")))?;
            tensors.push((name.clone(), tensor));
        }
        export_peft(folder, &tensors, config)
    }

    /// Returns a model, if there is one of this number.
    fn model(&self, number: usize) -> Result<SavedModel, CheckpointError> {
        let mut models = self.models();
        let count = models.len();
        if number >= count {
            return Err(self.lacks(format!(
                "it has {count} models; model {number} is not there, counted from 0"
            )));
        }
        Ok(models.swap_remove(number))
    }

    fn lacks(&self, reason: String) -> CheckpointError {
        CheckpointError::Lacks {
            path: self.folder.clone(),
            reason,
        }
    }
}

/// The dtype of a parameter's values; f32 holds all where pieces differ.
fn saved_dtype(parameter: &SavedTensor) -> Option<DType> {
    Some(match parameter.value()?.dtype.as_str() {
        "BF16" => DType::BF16,
        "F16" => DType::F16,
        _ => DType::F32,
    })
}

fn export_box(
    files: &mut ArrayFiles,
    one: &BoxEntry,
    tensor: &ExportedTensor,
    take: &mut dyn FnMut(&[u8]) -> Result<(), ExportError>,
) -> Result<(), ExportError> {
    let mut values = Vec::new();
    for start in (one.start..one.end).step_by(PIECE) {
        let piece = start..(start + PIECE).min(one.end);
        values.resize(piece.len(), 0.0);
        files.read(std::slice::from_ref(one), piece, &mut values)?;
        match tensor.dtype {
            DType::BF16 => {
                let mut rounded = vec![bf16::ZERO; values.len()];
                rounded.convert_from_f32_slice(&values);
                take(bytemuck::cast_slice(&rounded))?;
            }
            DType::F16 => {
                let mut rounded = vec![f16::ZERO; values.len()];
                rounded.convert_from_f32_slice(&values);
                let overflow = values
                    .iter()
                    .zip(&rounded)
                    .find(|(v, r)| v.is_finite() && r.is_infinite());
                if let Some((value, _)) = overflow {
                    return Err(ExportError::Unusable {
                        path: one.file.clone().into(),
                        reason: format!("{:?}: {value} is too large for f16; take bf16 or f32", tensor.name),
                    });
                }
                take(bytemuck::cast_slice(&rounded))?;
            }
            _ => take(bytemuck::cast_slice(&values))?,
        }
    }
    Ok(())
}
