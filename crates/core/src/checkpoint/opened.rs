//! A checkpoint as tools and people see it: read without a run, a group or a model.

use super::array_file::ArrayFiles;
use super::error::CheckpointError;
use super::folder;
use super::index::{BoxEntry, Index};
use sconce_zero::StatePiece;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A complete checkpoint, whose index has been read; values are read when they are asked for.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) folder: PathBuf,
    pub(super) index: Index,
    skipped: Vec<String>,
    pub(super) files: ArrayFiles,
}

/// A model in a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SavedModel {
    /// The update rule of its optimizer, such as `adamw`.
    pub rule: Option<String>,
    /// How often its parameters have been updated: the most, where some are updated less often.
    pub steps: u64,
    /// The loss scale, if losses were scaled.
    pub loss_scale: Option<f64>,
    /// Its parameters, in order of name.
    pub parameters: Vec<SavedTensor>,
}

/// A parameter in a checkpoint, with the state of its optimizer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SavedTensor {
    /// Its name in the model.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its values and the optimizer's arrays, all of this shape, and PowerSGD's, whose `power_sgd_q` has a shape of its own; in
    /// order of name.
    pub arrays: Vec<SavedArray>,
}

/// An array in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SavedArray {
    /// [`StatePiece::VALUE`] for the parameter itself, or the name that the update rule has for it.
    pub name: String,
    /// `F32`, `BF16` or `F16`; several where its pieces differ.
    pub dtype: String,
    /// Bytes of its elements.
    pub bytes: u64,
    /// The files in which they lie, in order of name.
    pub files: Vec<String>,
}

impl SavedTensor {
    /// Returns the parameter's own values.
    pub fn value(&self) -> Option<&SavedArray> {
        self.arrays.iter().find(|array| array.name == StatePiece::VALUE)
    }
}

/// What [`Checkpoint::verify`] found.
#[derive(Debug)]
pub struct Verified {
    /// Bytes that are as they were written.
    pub bytes: u64,
    /// What is not, each with its file and tensor.
    pub damages: Vec<CheckpointError>,
}

impl Checkpoint {
    /// Opens the checkpoint that `folder` is, or the newest complete one in it.
    ///
    /// # Errors
    /// [`CheckpointError`] when there is none, its index is damaged, or files are missing or cut off.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let (folder, index, skipped) = folder::locate(folder.as_ref())?;
        let files = ArrayFiles::new(&folder);
        Ok(Self {
            folder,
            index,
            skipped,
            files,
        })
    }

    /// Returns where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns why newer checkpoints beside it were passed over.
    pub fn skipped(&self) -> &[String] {
        &self.skipped
    }

    /// Returns how many ranks saved it.
    pub fn world_size(&self) -> usize {
        self.index.world_size
    }

    /// Returns the states of objects (schedules, loaders, the program's own), by name.
    pub fn objects(&self) -> &BTreeMap<String, Value> {
        &self.index.objects
    }

    /// Returns the settings of the run that saved, in words.
    pub fn settings(&self) -> &BTreeMap<String, String> {
        &self.index.settings
    }

    /// Returns what there is of each model, in the order in which their accelerators were made.
    pub fn models(&self) -> Vec<SavedModel> {
        let tensor = |(name, entry): (&String, &super::index::ParameterEntry)| SavedTensor {
            name: name.clone(),
            shape: entry.shape.clone(),
            arrays: entry.arrays.iter().map(|(name, boxes)| saved(name, boxes)).collect(),
        };
        let models = self.index.models.iter().map(|model| SavedModel {
            rule: model.state.rule.clone(),
            steps: model.state.steps.values().copied().max().unwrap_or(0),
            loss_scale: model.state.loss_scale.map(|state| state.scale),
            parameters: model.parameters.iter().map(tensor).collect(),
        });
        models.collect()
    }

    /// Reads all arrays and compares the hash of every mebibyte; stops at the first damage, unless `all` are asked for. Holds one
    /// mebibyte at a time.
    ///
    /// The index is compared with its hash when it is read.
    pub fn verify(&mut self, all: bool) -> Verified {
        let mut verified = Verified {
            bytes: 0,
            damages: Vec::new(),
        };
        // A file that cannot be used at all says so for each of its tensors.
        let mut told = BTreeSet::new();
        for entry in self.index.boxes() {
            match self.files.check(entry) {
                Ok(bytes) => verified.bytes += bytes,
                Err(damage) if told.insert(damage.to_string()) => verified.damages.push(damage),
                Err(_) => {}
            }
            if !all && !verified.damages.is_empty() {
                break;
            }
        }
        verified
    }
}

fn saved(name: &str, boxes: &[BoxEntry]) -> SavedArray {
    let dtypes = BTreeSet::from_iter(boxes.iter().map(|one| one.dtype.as_str()));
    let files = BTreeSet::from_iter(boxes.iter().map(|one| one.file.clone()));
    SavedArray {
        name: name.into(),
        dtype: Vec::from_iter(dtypes).join(","),
        bytes: boxes.iter().map(|one| one.bytes() as u64).sum(),
        files: files.into_iter().collect(),
    }
}
