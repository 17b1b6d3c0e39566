//! The one error type of this crate.

use std::io;
use std::path::PathBuf;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong with managed parameters and their state.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A weight file cannot be read as safetensors.
    #[error("{path}: {reason}")]
    WeightFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The model asks for a tensor that no weight file has.
    #[error("tensor {name:?} is in none of {files}{}", nearest.as_ref().map(|n| format!("; did you mean {n:?}?")).unwrap_or_default())]
    MissingTensor {
        /// The tensor.
        name: String,
        /// The files that were searched.
        files: String,
        /// The most similar name that exists, if one is similar.
        nearest: Option<String>,
    },
    /// A tensor in a file has another shape than the model asks for.
    #[error("{path}: tensor {name:?} has shape {found:?}, the model expects {expected:?}")]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Its shape in the file.
        found: Vec<usize>,
        /// The shape the model asks for.
        expected: Vec<usize>,
    },
    /// A parameter is asked for twice with different shapes or dtypes.
    #[error("parameter {name:?} was created as {first} and is now asked for as {second}; one name is one parameter")]
    Redefined {
        /// The parameter.
        name: String,
        /// Dtype and shape at creation.
        first: String,
        /// Dtype and shape asked for now.
        second: String,
    },
    /// A parameter is created when the model was already in use.
    #[error(
        "parameter {name:?} is created after the optimizer was set, or after the first forward of a unit with sharded \
         parameters, or after the first backward; build the whole model first"
    )]
    LateParameter {
        /// The parameter.
        name: String,
    },
    /// A parameter that a unit has sharded is asked for outside of any unit.
    #[error(
        "parameter {name:?} is sharded with a unit and is asked for outside of any: nobody would gather it for its use \
         there; make that part of the model a unit as well, or build it before the unit, which keeps the parameter whole"
    )]
    OutsideUnit {
        /// The parameter.
        name: String,
    },
    /// Ranks run the units of their models in different orders.
    #[error(
        "ranks run different units: {calls}; with sharded parameters all ranks run the same units in the same order, also \
         those whose result they do not need"
    )]
    UnitOrder {
        /// Who gathers what, with the units' names.
        calls: String,
        /// The group's error.
        source: sconce_collectives::Error,
    },
    /// A checkpoint could not be read.
    #[error("restoring {name} ({what}): {source}")]
    Restore {
        /// The parameter.
        name: String,
        /// Which array of it.
        what: String,
        /// Why not.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The dtype of a trained parameter is not supported.
    #[error("parameter {name:?} is {dtype}; managed parameters are f32, bf16 or f16")]
    UnsupportedDtype {
        /// The parameter.
        name: String,
        /// Its dtype.
        dtype: &'static str,
    },
    /// The loss is not one number.
    #[error("backward needs a loss of one element, got shape {shape:?}; reduce it first, for example with mean_all()")]
    LossShape {
        /// The loss's shape.
        shape: Vec<usize>,
    },
    /// The loss is not finite, and anomalies are looked for.
    #[error(
        "the loss is {value}: what is not finite arose in the forward pass or in the data; look at the input, and at the \
         results of the model's blocks in turn"
    )]
    LossAnomaly {
        /// The loss.
        value: f64,
    },
    /// A gradient is not finite, and anomalies are looked for.
    #[error(
        "{anomaly}. Gradients come in from the loss towards the inputs: look at the ops between the loss and the outputs of \
         this parameter's layer"
    )]
    GradientAnomaly {
        /// Which, and how.
        anomaly: crate::Anomaly,
    },
    /// Some parameters got no gradient.
    #[error(
        "{} parameter(s) got no gradient: {}. The usual cause is a candle op without backward between them and the \
         loss: softmax_last_dim, RmsNorm or LayerNorm of candle_nn, rotary_emb::rope; sconce_core::nn has the same \
         layers with a backward. If these parameters are unused on purpose, allow it with find_unused_parameters",
        names.len(), list(names)
    )]
    NoGradient {
        /// The parameters.
        names: Vec<String>,
    },
    /// Ranks do not have the same parameters.
    #[error(
        "rank {rank} has parameter number {number} as {found}, rank 0 has {expected}; all ranks must build one model"
    )]
    DifferentModels {
        /// The first rank that differs from rank 0.
        rank: usize,
        /// Its first parameter that differs, in order of creation, from 0.
        number: usize,
        /// That rank's name and shape, or `nothing`.
        found: String,
        /// Rank 0's name and shape, or `nothing`.
        expected: String,
    },
    /// A call came at the wrong time.
    #[error("{what}: {hint}")]
    Order {
        /// What was called.
        what: &'static str,
        /// What must come first.
        hint: &'static str,
    },
    /// A strategy asks for a placement that cannot be carried out.
    #[error("strategy {strategy}, parameter {name:?}: {reason}")]
    UnsupportedPlacement {
        /// The strategy's name.
        strategy: String,
        /// The parameter.
        name: String,
        /// What does not go together, and what to do.
        reason: &'static str,
    },
    /// A scope is asked for a parameter that it does not have.
    #[error("parameter {name:?} is not gathered here; open the scope with a set that contains it")]
    NotGathered {
        /// The parameter.
        name: String,
    },
    /// A parameter cannot be given these values.
    #[error("parameter {name:?}: {reason}")]
    Edit {
        /// The parameter.
        name: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A setting is out of range.
    #[error("{setting} is {value}; expected {expected}")]
    Setting {
        /// The setting's name.
        setting: &'static str,
        /// Its value.
        value: String,
        /// The allowed range.
        expected: &'static str,
    },
    /// The rule of a parameter group cannot be used.
    #[error("parameter group {number} ({rule}): {reason}")]
    ParameterGroup {
        /// The group, by number from 1.
        number: usize,
        /// The name of its rule.
        rule: &'static str,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// Gradients overflow at the smallest loss scale that is allowed.
    #[error(
        "gradients overflow although the loss scale is at its minimum of {minimum}; the loss or an activation is likely \
         not finite at any scale: look for its first value that is not, lower the learning rate, or train in bf16"
    )]
    LossScaleAtMinimum {
        /// The minimum.
        minimum: f64,
    },
    /// No file for training state can be made.
    #[error(
        "no file for training state can be made in {}: {source}; give an existing folder that this user may write to",
        folder.display()
    )]
    DiskFolder {
        /// The folder.
        folder: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// There is no room for training state.
    #[error(
        "{}: cannot reserve {bytes} bytes for training state: {source}; free space on that disk or choose a folder on a \
         larger one",
        path.display()
    )]
    DiskSpace {
        /// The file.
        path: PathBuf,
        /// How much was asked for.
        bytes: u64,
        /// What the system says.
        source: io::Error,
    },
    /// A file with training state cannot be read or written.
    #[error(
        "{}: {action} {bytes} bytes at byte {offset} failed: {source}; the training state in this file is lost: resume \
         from the last checkpoint, which is as it was",
        path.display()
    )]
    DiskAccess {
        /// The file.
        path: PathBuf,
        /// `reading` or `writing`.
        action: &'static str,
        /// Where in the file.
        offset: u64,
        /// How much.
        bytes: usize,
        /// What the system says.
        source: io::Error,
    },
    /// A file with training state became shorter while it was in use.
    #[error(
        "{}: {action} at byte {offset} found a file of {found} bytes where {expected} were expected: something else \
         truncated it. The training state in this file is lost: resume from the last checkpoint, which is as it was",
        path.display()
    )]
    DiskTruncated {
        /// The file.
        path: PathBuf,
        /// `reading` or `writing`.
        action: &'static str,
        /// Where in the file.
        offset: u64,
        /// The file's length now.
        found: u64,
        /// Its length at creation.
        expected: u64,
    },
    /// Training state on disk is used after an update of it failed.
    #[error(
        "{}: an earlier update of the training state in this file ended half-way; resume from the last checkpoint, which \
         is as it was",
        path.display()
    )]
    DiskStateLost {
        /// The file.
        path: PathBuf,
    },
    /// No thread can be started.
    #[error("no thread for {purpose} can be started: {source}; raise the limit of threads (ulimit -u)")]
    Thread {
        /// What the thread is for.
        purpose: &'static str,
        /// What the system says.
        source: io::Error,
    },
    /// Ranks could not exchange data.
    #[error(transparent)]
    Collectives(#[from] sconce_collectives::Error),
    /// candle refused a tensor operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => Self::wrap(other),
        }
    }
}

/// Lists names, at most ten.
fn list(names: &[String]) -> String {
    let shown = names.iter().take(10).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > 10 {
        format!("{shown} and {} more", names.len() - 10)
    } else {
        shown
    }
}
