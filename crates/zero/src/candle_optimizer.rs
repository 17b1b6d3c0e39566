//! candle's optimizers, and others that step `Var`s, on shares of parameters.
//!
//! Such an optimizer owns variables and its own state, so it cannot work in the engine's flat memory. It gets one variable
//! per parameter, which holds this rank's share, flat and in f32. Before a step the current values are copied in, after
//! it the results are copied out. This costs a copy of the share that lasts, one of its gradient during the step, and
//! what the optimizer allocates itself.

use crate::bucket::Held;
use crate::device::Intent;
use crate::parameter::{Master, Parameter, chunk_of};
use crate::storage::{ElementsMut, with_values};
use crate::{Residence, Result};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use std::ops::Range;

/// A candle optimizer that is to be made over this rank's shares.
///
/// For [`Engine::set_candle_optimizer`](crate::Engine::set_candle_optimizer). The optimizer must work element by element:
/// its variables are shares, and flat. One that looks at a parameter's shape or at sums over it (Adafactor, LAMB, Muon)
/// would do something else on every number of ranks. A share without elements has no variable, and a parameter that was
/// not used in a step has no gradient in it. What the optimizer remembers cannot be saved: candle does not show it.
///
/// ```
/// use sconce_zero::CandleOptimizer;
///
/// let optimizer = CandleOptimizer::new::<candle_nn::AdamW>(candle_nn::ParamsAdamW::default());
/// ```
pub struct CandleOptimizer {
    make: Make,
}

type Make = Box<dyn FnOnce(Vec<Var>) -> candle_core::Result<Box<dyn Steps>> + Send>;

impl CandleOptimizer {
    /// Takes the kind of optimizer, and its configuration.
    pub fn new<O>(config: O::Config) -> Self
    where
        O: candle_nn::Optimizer + Send + 'static,
        O::Config: Send + 'static,
    {
        Self {
            make: Box::new(|variables| Ok(Box::new(O::new(variables, config)?))),
        }
    }

    /// Makes the optimizer over variables for this rank's shares of the trained parameters.
    pub(crate) fn over(self, parameters: &[Parameter], rank: usize, world: usize) -> Result<SharesInVariables> {
        let shares = parameters.iter().map(|parameter| Share::new(parameter, rank, world));
        let shares: Vec<_> = shares.collect::<Result<_>>()?;
        let variables = shares.iter().flatten().map(|share| share.variable.clone());
        Ok(SharesInVariables {
            optimizer: (self.make)(variables.collect())?,
            shares,
        })
    }
}

impl std::fmt::Debug for CandleOptimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CandleOptimizer")
    }
}

/// The part of [`candle_nn::Optimizer`] that makes a trait object.
trait Steps: Send {
    fn learning_rate(&self) -> f64;
    fn step_at(&mut self, learning_rate: f64, gradients: &GradStore) -> candle_core::Result<()>;
}

impl<O: candle_nn::Optimizer + Send> Steps for O {
    fn learning_rate(&self) -> f64 {
        candle_nn::Optimizer::learning_rate(self)
    }

    fn step_at(&mut self, learning_rate: f64, gradients: &GradStore) -> candle_core::Result<()> {
        self.set_learning_rate(learning_rate);
        self.step(gradients)
    }
}

/// An optimizer, and the variables that it steps, by parameter.
pub(crate) struct SharesInVariables {
    optimizer: Box<dyn Steps>,
    shares: Vec<Option<Share>>,
}

/// One parameter's share.
#[derive(Debug)]
struct Share {
    elements: Range<usize>,
    variable: Var,
}

impl SharesInVariables {
    /// Returns the optimizer's own learning rate.
    pub(crate) fn learning_rate(&self) -> f64 {
        self.optimizer.learning_rate()
    }

    /// Returns the bytes of the variables.
    pub(crate) fn bytes(&self) -> usize {
        let elements = self.shares.iter().flatten().map(|share| share.elements.len());
        elements.sum::<usize>() * size_of::<f32>()
    }

    /// Steps the shares of all parameters that hold a gradient; if that fails, no parameter has changed.
    pub(crate) fn step(
        &mut self,
        learning_rate: f64,
        gradient_scale: f32,
        buckets: &[Held<'_>],
        holds: &[bool],
        parameters: &[Parameter],
    ) -> Result<()> {
        let mut gradients = GradStore::default();
        for bucket in buckets {
            for slot in &bucket.layout.slots {
                let number = slot.parameter;
                let Some(share) = self.shares[number].as_ref().filter(|_| holds[number]) else {
                    continue;
                };
                share.copy_in(&parameters[number])?;
                let parts = bucket.parts.clone().map(|part| bucket.gradient(slot, part));
                let gradient = parts.flatten().map(|value| value * gradient_scale);
                let gradient = Tensor::from_vec(gradient.collect(), share.elements.len(), &Device::Cpu)?;
                gradients.insert(&share.variable, gradient);
            }
        }
        self.optimizer.step_at(learning_rate, &gradients)?;
        let shares = self.shares.iter().zip(parameters).zip(holds);
        for ((share, parameter), _) in shares.filter(|(_, holds)| **holds) {
            share.as_ref().map_or(Ok(()), |share| share.copy_out(parameter))?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for SharesInVariables {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharesInVariables")
            .field("shares", &self.shares.len())
            .finish_non_exhaustive()
    }
}

impl Share {
    /// Makes the variable, if the parameter is trained and this rank has a share of it.
    fn new(parameter: &Parameter, rank: usize, world: usize) -> Result<Option<Self>> {
        let all = parameter.info.elements();
        let elements = match parameter.placement.optimizer_state {
            Residence::Replicated => 0..all,
            Residence::Sharded => chunk_of(all, rank, world),
        };
        if !parameter.is_trained || elements.is_empty() {
            return Ok(None);
        }
        let mut values = vec![0.0; elements.len()];
        parameter.with_master(Intent::Read, &elements, 0..elements.len(), |master| {
            master.read_into(&mut values);
        })?;
        let variable = Var::from_vec(values, elements.len(), &Device::Cpu)?;
        Ok(Some(Self { elements, variable }))
    }

    /// Gives the variable the parameter's values, which may have been set since the last step.
    fn copy_in(&self, parameter: &Parameter) -> Result<()> {
        self.with_both(parameter, Intent::Read, |variable, master| master.read_into(variable))
    }

    /// Gives the parameter the variable's values.
    fn copy_out(&self, parameter: &Parameter) -> Result<()> {
        self.with_both(parameter, Intent::Overwrite, |variable, master| master.write(variable))
    }

    fn with_both(
        &self,
        parameter: &Parameter,
        intent: Intent,
        work: impl FnOnce(&mut [f32], Master<'_>),
    ) -> Result<()> {
        let all = 0..self.elements.len();
        with_values(self.variable.as_tensor(), |variable| match variable {
            ElementsMut::F32(variable) => {
                parameter.with_master(intent, &self.elements, all, |master| work(variable, master))
            }
            // The variable was made in f32, and a variable keeps its type.
            ElementsMut::Bf16(_) | ElementsMut::F16(_) => Ok(()),
        })?
    }
}
