//! Losses that have been back-propagated: a graph is for one backward.
//!
//! candle keeps a graph after its backward, and differentiates it once more without a word. Its gradients would count twice;
//! after a step they would be those of activations that the parameters of now never had. PyTorch frees what a backward
//! needs, so that programs moved here expect an error.

use crate::{Error, Result};
use candle_core::TensorId;
use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// As many losses are known as any window is likely to have.
const MOST: usize = 1024;

/// The last losses that have been back-propagated.
#[derive(Debug, Default)]
pub(crate) struct SpentLosses {
    ids: Mutex<VecDeque<TensorId>>,
}

impl SpentLosses {
    /// Fails for a loss that has been back-propagated.
    pub(crate) fn check(&self, loss: TensorId) -> Result<()> {
        let ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        if !ids.contains(&loss) {
            return Ok(());
        }
        Err(Error::Order {
            what: "backward",
            hint: "this loss has been back-propagated already, and its gradients would count twice, after a step for \
                   parameters that are no longer what they were; run the model's forward again"
                .into(),
        })
    }

    /// Takes note of a loss that has been back-propagated.
    pub(crate) fn spend(&self, loss: TensorId) {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        ids.push_back(loss);
        if ids.len() > MOST {
            ids.pop_front();
        }
    }
}
