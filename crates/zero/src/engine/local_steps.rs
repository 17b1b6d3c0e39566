//! Steps that each rank takes by itself, between which parameters are averaged: local SGD (Stich 2019).

use super::Engine;
use crate::device::Intent;
use crate::parameter::{Home, Parameter};
use crate::{Error, Residence, Result};
use sconce_collectives::ReduceOp;
use std::sync::atomic::Ordering::Relaxed;

impl Engine {
    /// Lets every rank step by its own gradients from now on, or no more: [`Engine::backward`] then never synchronises, and
    /// parameters drift apart until [`Engine::average_parameters`].
    ///
    /// # Errors
    /// [`Error::Order`] when state is sharded, because a rank then cannot step alone, and with loss scaling or
    /// `skip_nonfinite`, which decide for all ranks together.
    pub fn step_locally(&self, on: bool) -> Result<()> {
        let what = "steps of each rank by itself (local SGD)";
        let is_whole = |parameter: &Parameter| {
            let place = parameter.placement;
            [place.parameter, place.gradient, place.optimizer_state] == [Residence::Replicated; 3]
        };
        if on && !self.parameters.all().iter().filter(|p| p.is_trained).all(is_whole) {
            let hint = "use data parallelism: with sharded state every step needs all ranks";
            return Err(Error::Order { what, hint });
        }
        if on && self.loss_guard().skips() {
            let hint =
                "use f32 or bf16 without loss scaling: whether a step is skipped is decided by all ranks together";
            return Err(Error::Order { what, hint });
        }
        self.steps_locally.store(on, Relaxed);
        self.gradients.step_locally(on);
        Ok(())
    }

    /// Gives all ranks the mean of their values of every trained parameter, in f32 masters where there are some; called by
    /// all ranks. What optimizers keep stays each rank's own.
    ///
    /// # Errors
    /// Failures of candle and of the group.
    pub fn average_parameters(&self) -> Result<()> {
        let parameters = self.parameters.all();
        let whole = |parameter: &&Parameter| parameter.is_trained && !matches!(parameter.home, Home::Shard { .. });
        for parameter in parameters.iter().filter(whole) {
            let elements = parameter.info.elements();
            let (mut values, all) = (vec![0f32; elements], 0..elements);
            parameter.with_master(Intent::Read, &all, all.clone(), |master| master.read_into(&mut values))?;
            self.mesh.world.all_reduce(&mut values, ReduceOp::Mean)?;
            parameter.with_master(Intent::Overwrite, &all, all.clone(), |master| master.write(&values))?;
        }
        Ok(())
    }
}
