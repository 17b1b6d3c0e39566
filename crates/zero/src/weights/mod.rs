//! Where initial values come from: a seed, or safetensors files.

mod files;
mod foreign;
mod mapped_file;
mod seeded;

pub use files::WeightFiles;
pub use foreign::ForeignWeights;
pub use mapped_file::MappedFile;

use crate::{Error, Result};
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
}

/// An opened source.
#[derive(Debug)]
pub(crate) enum WeightSource {
    Random { seed: u64 },
    Files(WeightFiles),
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
        }
    }
}

impl WeightSource {
    /// Returns those elements of a tensor, in f32, that lie in `range` of the tensor's elements in order.
    pub(crate) fn load_range(&self, name: &str, shape: &Shape, init: Init, range: Range<usize>) -> Result<Vec<f32>> {
        match self {
            Self::Random { seed } => seeded::draw_range(*seed, name, shape, init, range),
            Self::Files(files) => files.load_range(name, shape, range),
        }
    }

    /// Describes, in one line, what all ranks must have in common where each draws or reads only its share.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Random { seed } => format!("seed {seed}"),
            Self::Files(_) => "files".to_owned(),
        }
    }

    pub(crate) fn shape_of(&self, name: &str) -> Result<Shape> {
        match self {
            Self::Random { .. } => Err(Error::Order {
                what: "a parameter without a shape",
                hint: "random initialisation needs the shape; use VarBuilder::get, or load from files",
            }),
            Self::Files(files) => files.shape_of(name),
        }
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        match self {
            Self::Random { .. } => true,
            Self::Files(files) => files.contains(name),
        }
    }
}
