//! Steps that each rank takes by itself, between which parameters are averaged: local SGD (Stich 2019).

use super::Engine;
use crate::device::Intent;
use crate::parameter::Parameter;
use crate::{Error, Residence, Result, Tier};
use candle_core::DType;
use sconce_collectives::ReduceOp;
use std::sync::atomic::Ordering::Relaxed;

impl Engine {
    /// Lets every rank step by its own gradients from now on, or no more: [`Engine::backward`] then never synchronises, and
    /// parameters drift apart until [`Engine::average_parameters`].
    ///
    /// # Errors
    /// [`Error::Order`] when a rank cannot step alone, because state is sharded or f32 masters are on disk, and with loss
    /// scaling or `skip_nonfinite`, which decide for all ranks together.
    pub fn step_locally(&self, on: bool) -> Result<()> {
        if on {
            check_whole(&self.parameters.all())?;
        }
        if on && self.loss_guard().skips() {
            let hint =
                "use f32 or bf16 without loss scaling: whether a step is skipped is decided by all ranks together";
            return Err(Error::Order { what: WHAT, hint });
        }
        self.steps_locally.store(on, Relaxed);
        self.gradients.step_locally(on);
        Ok(())
    }

    /// Gives all ranks the mean of their values of every trained parameter, in f32 masters where there are some; called by
    /// all ranks. What optimizers keep stays each rank's own.
    ///
    /// # Errors
    /// [`Error::Order`] as for [`Engine::step_locally`]; failures of candle and of the group.
    pub fn average_parameters(&self) -> Result<()> {
        let parameters = self.parameters.all();
        check_whole(&parameters)?;
        for parameter in parameters.iter().filter(|parameter| parameter.is_trained) {
            let elements = parameter.info.elements();
            let (mut values, all) = (vec![0f32; elements], 0..elements);
            parameter.with_master(Intent::Read, &all, all.clone(), |master| master.read_into(&mut values))?;
            self.mesh.world.all_reduce(&mut values, ReduceOp::Mean)?;
            parameter.with_master(Intent::Overwrite, &all, all.clone(), |master| master.write(&values))?;
        }
        Ok(())
    }
}

const WHAT: &str = "steps of each rank by itself (local SGD)";

/// Refuses trained parameters of which a rank does not have, in memory, all that it updates: it could not step alone, or
/// the average would not reach the f32 masters that the next step reads.
fn check_whole(parameters: &[Parameter]) -> Result<()> {
    let refuse = |hint| Err(Error::Order { what: WHAT, hint });
    for parameter in parameters.iter().filter(|parameter| parameter.is_trained) {
        let place = parameter.placement;
        if [place.parameter, place.gradient, place.optimizer_state] != [Residence::Replicated; 3] {
            return refuse("use data parallelism: with sharded state every step needs all ranks");
        }
        if parameter.tensor.dtype() != DType::F32 && place.optimizer_state_tier == Tier::Disk {
            return refuse("keep optimizer state in memory: f32 masters on disk are not averaged");
        }
    }
    Ok(())
}
