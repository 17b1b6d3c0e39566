//! The backward of a loss: what is checked, how the loss is scaled, when gradients are laid out and complete.

use super::Engine;
use crate::backward_scope::BackwardScope;
use crate::layout::buckets;
use crate::loss_guard::scaled;
use crate::optimizer::in_range;
use crate::weighted_mean::WeightedMean;
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use sconce_collectives::ReduceOp;
use std::sync::atomic::Ordering::Relaxed;

/// Stack for the backward pass: candle's backward recurses over the graph, some 200 bytes to a few KiB a node.
const BACKWARD_STACK: usize = 512 << 20;

impl Engine {
    /// Back-propagates a loss of one element; with `synchronise` the gradients become the mean over all ranks.
    ///
    /// Gradients add up until [`Engine::zero_grad`], or a step that is skipped. With loss scaling the loss is multiplied
    /// first, in f32 at least, and the gradients are divided by that same number wherever they are used or shown. All
    /// losses between two calls of `zero_grad` are multiplied by one scale. A loss of f16 bears no scale of 65520 or
    /// more: make it f32 in the model.
    ///
    /// # Errors
    /// [`Error::LossShape`]; [`Error::NoGradient`] when a parameter is not reached and that is not allowed; failures of
    /// candle and of the group.
    pub fn backward(&self, loss: &Tensor, synchronise: bool) -> Result<()> {
        check_shape(loss)?;
        self.gradients.mean(false)?;
        self.run_backward(loss, 1.0, synchronise)
    }

    fn run_backward(&self, loss: &Tensor, factor: f64, synchronise: bool) -> Result<()> {
        let synchronise = synchronise && !self.steps_locally.load(Relaxed);
        let _span = tracing::debug_span!("backward", synchronise).entered();
        self.units.explain_loss(loss);
        let outcome = stacker::maybe_grow(BACKWARD_STACK / 2, BACKWARD_STACK, || {
            self.backward_here(loss, factor, synchronise)
        });
        if let Err(error) = &outcome {
            self.gradients.fail();
            // Peers may wait for buckets that will never come.
            self.mesh.abort(&error.to_string());
        }
        outcome
    }

    /// Back-propagates the mean loss of `weight` samples or tokens: a window of such backwards on all ranks comes to the
    /// gradient of the mean over all of them, however they are spread over micro-batches and ranks.
    ///
    /// With `complete` the backward ends the window; it must synchronise then, and only afterwards do the gradients held
    /// bear the window's sum of weights. A weight of 0 contributes nothing; where all are 0, so are the gradients. Called by
    /// all ranks, which tell each other their weights. Backwards without weight cannot be added, [`Error::Order`].
    ///
    /// # Errors
    /// [`Error::Setting`] for a weight below 0 or not finite; as [`Engine::backward`].
    pub fn backward_weighted(&self, loss: &Tensor, weight: f64, synchronise: bool, complete: bool) -> Result<()> {
        in_range(
            "weight",
            weight,
            "a number of samples or tokens, 0 or more",
            weight >= 0.0 && weight.is_finite(),
        )?;
        check_shape(loss)?;
        if self.steps_locally.load(Relaxed) {
            return Err(Error::Order {
                what: "a backward with a weight while ranks step by themselves (local SGD)",
                hint: "weights make means over all ranks; use backward",
            });
        }
        let before = self.gradients.mean(true)?;
        let ranks = self.mesh.world.size();
        let mut total = [weight];
        self.mesh.world.all_reduce(&mut total, ReduceOp::Sum)?;
        let mean = WeightedMean::with(before, total[0], ranks);
        self.run_backward(loss, weight * mean.factor(), synchronise)?;
        let mean = if synchronise && complete {
            let (correction, mean) = mean.complete(ranks);
            self.gradients.scale_by(correction);
            mean
        } else {
            mean
        };
        self.gradients.set_mean(mean);
        Ok(())
    }

    fn backward_here(&self, loss: &Tensor, factor: f64, synchronise: bool) -> Result<()> {
        if self.options.detect_anomaly {
            check_finite(loss)?;
        }
        if !self.gradients.is_laid_out() {
            self.lay_out(loss)?;
        }
        let scale = self.loss_guard().scale();
        let to_come = self.units.gradients_to_come(loss);
        let scale = self.gradients.begin(synchronise, scale, to_come)?;
        let scope = BackwardScope::enter(&self.gradients);
        if let Err(error) = scaled(loss, scale * factor)?.backward() {
            return Err(self.gradients.take_failure().unwrap_or(Error::Candle(error)));
        }
        scope.others().iter().try_for_each(|units| units.end_backward())?;
        drop(scope);
        if !self.options.find_unused_parameters {
            self.fail_for_unused(&self.gradients.missing())?;
        }
        self.units.end_backward()?;
        self.gradients.finish(self.options.find_unused_parameters)
    }

    /// Lays the buckets out in the order in which rank 0's graph makes gradients ready.
    fn lay_out(&self, loss: &Tensor) -> Result<()> {
        self.units.make_ready()?;
        let parameters = self.parameters.all();
        let mut order = Vec::new();
        for parameter in self.units.gradients_of(loss) {
            if !order.contains(&parameter) {
                order.push(parameter);
            }
        }
        let trained = (0..parameters.len()).filter(|number| parameters[*number].is_trained);
        let mut rest: Vec<usize> = trained.filter(|number| !order.contains(number)).collect();
        if !self.options.find_unused_parameters {
            self.fail_for_unused(&rest)?;
        }
        rest.sort_by(|a, b| parameters[*a].info.name.cmp(&parameters[*b].info.name));
        order.extend(rest);
        let mut agreed: Vec<u32> = order.iter().map(|number| *number as u32).collect();
        self.mesh.world.broadcast(&mut agreed, 0)?;
        self.lay_out_as(agreed.iter().map(|number| *number as usize).collect())
    }

    /// Lays the buckets out in an order that all ranks know, of all trained parameters.
    pub(super) fn lay_out_as(&self, order: Vec<usize>) -> Result<()> {
        let parameters = self.parameters.all();
        let about = |number: usize| {
            let parameter = &parameters[number];
            (parameter.placement, parameter.tensor.dtype(), parameter.info.elements())
        };
        let layouts = buckets(
            &order,
            about,
            self.mesh.shard.size(),
            self.options.first_bucket_bytes,
            self.options.bucket_bytes,
        );
        let sent_as = (self.options.reduce_dtype, self.options.power_sgd.as_ref());
        self.gradients
            .lay_out(&self.mesh, (order, layouts), self.parameters(), sent_as)
    }

    fn fail_for_unused(&self, numbers: &[usize]) -> Result<()> {
        let parameters = self.parameters.all();
        let trained = numbers
            .iter()
            .map(|number| &parameters[*number])
            .filter(|p| p.is_trained);
        let names: Vec<_> = trained.map(|parameter| parameter.info.name.clone()).collect();
        if names.is_empty() {
            return Ok(());
        }
        Err(Error::NoGradient { names })
    }
}

fn check_shape(loss: &Tensor) -> Result<()> {
    if loss.elem_count() == 1 {
        return Ok(());
    }
    Err(Error::LossShape {
        shape: loss.dims().to_vec(),
    })
}

fn check_finite(loss: &Tensor) -> Result<()> {
    let value = loss.detach().to_dtype(DType::F64)?.reshape(())?.to_scalar::<f64>()?;
    if value.is_finite() {
        return Ok(());
    }
    Err(Error::LossAnomaly { value })
}
