//! Where initial values come from: a seed, or safetensors files.

mod files;
mod foreign;
mod mapped_file;
mod seeded;

pub use files::WeightFiles;
pub use foreign::ForeignWeights;
pub use mapped_file::MappedFile;

use crate::{Error, ParameterInfo, ParameterSet, Result};
use candle_core::Shape;
use candle_nn::Init;
use std::ops::Range;
use std::sync::Arc;

/// A source of initial values.
#[derive(Debug, Clone)]
pub enum Weights {
    /// Each parameter is drawn as the model asks (its `Init`), from the seed and the parameter's name alone: the same
    /// on every rank and for every order of creation.
    Random {
        /// The seed.
        seed: u64,
    },
    /// Each parameter is read from safetensors files, converted to the dtype asked for.
    Files(WeightFiles),
    /// The parameters in `drawn`, a rule on names, are drawn as with `Random`, all others are read as with `Files`: adapters
    /// that begin beside a base that exists.
    FilesAndRandom {
        /// What the files have.
        files: WeightFiles,
        /// What they need not have.
        drawn: ParameterSet,
        /// The seed.
        seed: u64,
    },
}

/// An opened source.
#[derive(Debug)]
pub(crate) enum WeightSource {
    Random {
        seed: u64,
    },
    Files(WeightFiles),
    FilesAndRandom {
        files: WeightFiles,
        drawn: ParameterSet,
        seed: u64,
    },
}

/// What a parameter begins with.
#[derive(Debug, Clone)]
pub(crate) struct Initial {
    pub(crate) source: Arc<WeightSource>,
    pub(crate) init: Init,
}

impl Initial {
    /// Returns a range of the parameter's elements, in f32.
    pub(crate) fn load(&self, name: &str, shape: &Shape, range: Range<usize>) -> Result<Vec<f32>> {
        self.source.load_range(name, shape, self.init, range)
    }
}

impl From<Weights> for WeightSource {
    fn from(weights: Weights) -> Self {
        match weights {
            Weights::Random { seed } => Self::Random { seed },
            Weights::Files(files) => Self::Files(files),
            Weights::FilesAndRandom { files, drawn, seed } => Self::FilesAndRandom { files, drawn, seed },
        }
    }
}

impl WeightSource {
    /// Returns those elements of a tensor, in f32, that lie in `range` of the tensor's elements in order.
    pub(crate) fn load_range(&self, name: &str, shape: &Shape, init: Init, range: Range<usize>) -> Result<Vec<f32>> {
        match self {
            Self::Random { seed } => seeded::draw_range(*seed, name, shape, init, range),
            Self::Files(files) => files.load_range(name, shape, range),
            Self::FilesAndRandom { files, drawn, seed } => {
                if is_in(drawn, name) {
                    seeded::draw_range(*seed, name, shape, init, range)
                } else {
                    files.load_range(name, shape, range)
                }
            }
        }
    }

    /// Describes, in one line, what all ranks must have in common where each draws or reads only its share.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Random { seed } => format!("seed {seed}"),
            Self::Files(_) => "files".to_owned(),
            Self::FilesAndRandom { seed, .. } => format!("files and seed {seed}"),
        }
    }

    pub(crate) fn shape_of(&self, name: &str) -> Result<Shape> {
        match self {
            Self::Random { .. } => Err(Error::Order {
                what: "a parameter without a shape",
                hint: "random initialisation needs the shape; use VarBuilder::get, or load from files",
            }),
            Self::Files(files) | Self::FilesAndRandom { files, .. } => files.shape_of(name),
        }
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        match self {
            Self::Random { .. } => true,
            Self::Files(files) => files.contains(name),
            Self::FilesAndRandom { files, drawn, .. } => is_in(drawn, name) || files.contains(name),
        }
    }
}

/// Says whether a set has the parameter of a name, whose shape may not be known yet.
fn is_in(set: &ParameterSet, name: &str) -> bool {
    set.contains(&ParameterInfo {
        name: name.into(),
        shape: Vec::new(),
    })
}
