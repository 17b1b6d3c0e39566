//! What a checkpoint keeps of an engine, independent of how many ranks there are and of how state is sharded.

use crate::{Elements, LossScaleState, ParameterInfo};
use candle_core::DType;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// What an engine knows besides arrays; the same on all ranks.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct EngineState {
    /// The update rule's name; `None` with an optimizer of candle's kind, whose state is its own.
    pub rule: Option<String>,
    /// The names of the rule's state arrays.
    pub state_names: Vec<String>,
    /// The trained parameters in the order in which gradients become ready; empty before the first backward.
    pub gradient_order: Vec<String>,
    /// How often each trained parameter has been updated.
    pub steps: BTreeMap<String, u64>,
    /// The loss scale, if losses are scaled.
    pub loss_scale: Option<LossScaleState>,
    /// How far PowerSGD is, if gradients are compressed so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_sgd: Option<PowerSgdState>,
}

/// How far [`PowerSgd`](crate::PowerSgd) is, and what is saved of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PowerSgdState {
    /// Synchronised backwards so far.
    pub iterations: u64,
    /// Columns of the thin matrices that are saved as [`StatePiece::POWER_SGD_Q`]; `None` where none are.
    pub matrix_rank: Option<usize>,
    /// Ranks that saved what they owe, each as [`StatePiece::power_sgd_error`]; `None` where none did.
    pub error_ranks: Option<usize>,
}

/// Some elements of one array, which belong to this rank: over all ranks every element comes once.
#[derive(Debug)]
pub struct StatePiece<'a> {
    /// The parameter.
    pub info: &'a ParameterInfo,
    /// [`StatePiece::VALUE`], the name of a state array of the update rule, or an array of PowerSGD's.
    pub what: &'a str,
    /// The array's shape: the parameter's, but for [`StatePiece::POWER_SGD_Q`].
    pub shape: &'a [usize],
    /// Which of the array's elements these are, in order.
    pub elements: Range<usize>,
    /// Their values: f32, but those of frozen parameters, which are in the dtype of the model.
    pub values: Elements<'a>,
    /// Whether the parameter is trained.
    pub is_trained: bool,
}

impl StatePiece<'_> {
    /// The parameter's own values: f32 masters where it is trained.
    pub const VALUE: &'static str = "value";
    /// PowerSGD's thin matrix for the parameter, of shape [columns, matrix rank].
    pub const POWER_SGD_Q: &'static str = "power_sgd_q";

    /// How the names of arrays begin that [`StatePiece::power_sgd_error`] makes.
    pub const POWER_SGD_ERROR: &'static str = "power_sgd_error.";

    /// Names what a rank's gradients of the parameter have not sent yet, by PowerSGD.
    pub fn power_sgd_error(rank: usize) -> String {
        format!("{}{rank}", Self::POWER_SGD_ERROR)
    }
}

/// What a piece will be, before its values are looked at.
#[derive(Debug, Clone)]
pub struct PlannedPiece {
    /// The parameter.
    pub info: Arc<ParameterInfo>,
    /// [`StatePiece::what`].
    pub what: Cow<'static, str>,
    /// [`StatePiece::shape`].
    pub shape: Vec<usize>,
    /// Which of the array's elements.
    pub elements: Range<usize>,
    /// The dtype of its values.
    pub dtype: DType,
    /// Whether the parameter is trained.
    pub is_trained: bool,
}

/// Where an engine gets back what it was saved as.
pub trait StateSource {
    /// Fills `values` with some elements of an array of a parameter; returns false if the source has no such array, in which
    /// case they stay as they are.
    ///
    /// # Errors
    /// Whatever reading may fail with.
    fn read(
        &mut self,
        info: &ParameterInfo,
        what: &str,
        elements: Range<usize>,
        values: &mut [f32],
    ) -> Result<bool, Box<dyn std::error::Error + Send + Sync>>;
}
