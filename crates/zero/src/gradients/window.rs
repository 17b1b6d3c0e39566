//! What is known of the gradients held beside their values: what they weigh, and which was the first that is not finite.

use super::{Gradients, Phase, State};
use crate::anomaly::{Anomaly, AnomalyWatch};
use crate::weighted_mean::WeightedMean;
use crate::{Error, Result};

impl Gradients {
    /// Says what the gradients held weigh, if their losses had weights.
    ///
    /// # Errors
    /// [`Error::Order`] where gradients with and without weights would be added: `weighted` says of what kind those that
    /// come are.
    pub(crate) fn mean(&self, weighted: bool) -> Result<Option<WeightedMean>> {
        let state = self.lock();
        if state.phase == Phase::Empty || state.mean.is_some() == weighted {
            return Ok(state.mean.filter(|_| weighted));
        }
        Err(Error::Order {
            what: "a backward with a weight and one without in one window",
            hint: "call backward_weighted for every micro-batch of a window or for none, and zero_grad after the step",
        })
    }

    /// Takes note of what the gradients held weigh.
    pub(crate) fn set_mean(&self, mean: WeightedMean) {
        self.lock().mean = Some(mean);
    }

    /// Looks at gradients as they come in, from now on.
    pub(crate) fn watch(&self, watch: AnomalyWatch) {
        self.lock().watch = Some(watch);
    }

    /// Returns the first gradient of the last backward that was not finite, if they are looked at.
    pub(crate) fn anomaly(&self) -> Option<Anomaly> {
        self.lock().watch.as_ref().and_then(AnomalyWatch::found)
    }
}

impl State {
    /// Looks whether a gradient that has come is finite, if it is to be.
    ///
    /// # Errors
    /// [`Error::GradientAnomaly`] where what is not finite ends the backward.
    pub(super) fn look_at(&mut self, parameter: usize, values: &[f32]) -> Result<()> {
        match &mut self.watch {
            Some(watch) => watch.look_at(&self.parameters[parameter], values),
            None => Ok(()),
        }
    }
}
