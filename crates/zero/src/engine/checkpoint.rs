//! Taking an engine's state apart into pieces that know nothing of ranks, and putting it together again.

use super::{Engine, Optimizer};
use crate::device::Intent;
use crate::parameter::{Home, Master, Parameter, chunk_of};
use crate::{Elements, EngineState, Error, ParameterInfo, PlannedPiece, Result, StatePiece, StateSource};
use candle_core::DType;
use std::ops::Range;
use std::sync::Arc;

impl Engine {
    /// Returns what a checkpoint keeps besides arrays.
    pub fn state(&self) -> EngineState {
        let parameters = self.parameters.all();
        let name = |number: usize| parameters[number].info.name.clone();
        let mut state = EngineState {
            gradient_order: self.gradients.order().into_iter().map(name).collect(),
            loss_scale: self.loss_scale_state(),
            power_sgd: self.gradients.compression_state(),
            ..EngineState::default()
        };
        if let Some(Optimizer::Rule(stepper)) = &*self.optimizer() {
            state.rule = Some(stepper.rule().name().to_owned());
            state.state_names = stepper.rule().state_names().iter().map(ToString::to_string).collect();
            let trained = parameters.iter().zip(stepper.steps()).filter(|(p, _)| p.is_trained);
            state.steps = trained.map(|(p, steps)| (p.info.name.clone(), *steps)).collect();
        }
        state
    }

    /// Hands `visit` the pieces of state that this rank is to save, in an order that is the same on every run; asks nobody.
    /// Over all ranks these are all elements, each once: replicas leave theirs to the first.
    ///
    /// # Errors
    /// Those of `visit`, of candle, and of the disk for state that lies there.
    pub fn visit_state(&self, visit: &mut dyn FnMut(StatePiece<'_>) -> Result<()>) -> Result<()> {
        if self.mesh.world.rank() < self.mesh.shard.size() {
            let place = self.mesh.place();
            let parameters = self.parameters.all();
            for parameter in parameters.iter().filter(|parameter| parameter.has_its_values()) {
                visit_value(parameter, place, visit)?;
            }
            if let Some(Optimizer::Rule(stepper)) = &mut *self.optimizer() {
                self.gradients
                    .with_layout(|buckets| stepper.visit(place.0, buckets, &parameters, visit))??;
            }
        }
        self.gradients.visit_compression(visit)
    }

    /// Returns what [`Engine::visit_state`] would visit, in that order, without looking at any value.
    ///
    /// # Errors
    /// [`Error::Order`] after a failed backward.
    pub fn state_plan(&self) -> Result<Vec<PlannedPiece>> {
        let (rank, world) = self.mesh.place();
        if self.mesh.world.rank() >= self.mesh.shard.size() {
            return Ok(self.gradients.plan_compression());
        }
        let mut plan = Vec::new();
        let parameters = self.parameters.all();
        let piece = |parameter: &Parameter, what: &'static str, elements: Range<usize>| PlannedPiece {
            info: Arc::clone(&parameter.info),
            what: what.into(),
            shape: parameter.info.shape.clone(),
            elements,
            dtype: match parameter.is_trained {
                true => DType::F32,
                false => parameter.tensor.dtype(),
            },
            is_trained: parameter.is_trained,
        };
        for parameter in parameters.iter().filter(|parameter| parameter.has_its_values()) {
            let elements = chunk_of(parameter.info.elements(), rank, world);
            plan.extend((!elements.is_empty()).then(|| piece(parameter, StatePiece::VALUE, elements)));
        }
        if let Some(Optimizer::Rule(stepper)) = &*self.optimizer() {
            let of_state = self
                .gradients
                .with_layout(|buckets| stepper.plan(rank, buckets, &parameters))?;
            let of_state = of_state.into_iter();
            plan.extend(of_state.map(|(number, what, elements)| piece(&parameters[number], what, elements)));
        }
        plan.extend(self.gradients.plan_compression());
        Ok(plan)
    }

    /// Becomes what was saved: values, optimizer state, counts and loss scale, as far as `source` has them; called by all
    /// ranks, after the optimizer is set. Each rank reads only what it holds. Gradients are forgotten.
    ///
    /// Returns the arrays that `source` did not have, as `name (what)`.
    ///
    /// # Errors
    /// [`Error::Order`] before an optimizer is set; [`Error::Restore`] when the source fails; failures of candle, of the disk
    /// and of the group, which is aborted: a model that is half restored is no use.
    pub fn restore_state(&self, state: &EngineState, source: &mut dyn StateSource) -> Result<Vec<String>> {
        let outcome = self.restore(state, source);
        if let Err(error) = &outcome {
            self.mesh.abort(&error.to_string());
        }
        outcome
    }

    fn restore(&self, state: &EngineState, source: &mut dyn StateSource) -> Result<Vec<String>> {
        if self.optimizer().is_none() {
            return Err(Error::Order {
                what: "restoring a checkpoint",
                hint: "set an optimizer first (prepare)",
            });
        }
        self.units.release_all()?;
        self.gradients.clear();
        let parameters = self.parameters.all();
        let mut reading = Reading {
            source,
            missing: Vec::new(),
        };
        for parameter in &parameters {
            self.restore_value(parameter, &mut reading)?;
        }
        if !self.gradients.is_laid_out() {
            let number = |name: &String| parameters.iter().position(|parameter| parameter.info.name == *name);
            let order = Vec::from_iter(state.gradient_order.iter().filter_map(number));
            let is_trained = |number: &usize| parameters[*number].is_trained;
            let trained = (0..parameters.len()).filter(is_trained).count();
            if order.len() == trained && order.iter().all(is_trained) {
                self.lay_out_as(order)?;
            }
        }
        if let Some(Optimizer::Rule(stepper)) = &mut *self.optimizer() {
            let steps = parameters.iter().map(|p| state.steps.get(&p.info.name).copied());
            stepper.set_steps(steps);
            if self.gradients.is_laid_out() && state.rule.is_some() {
                let gpu = self.staging.any_gpu();
                self.gradients
                    .with_layout(|buckets| stepper.restore(buckets, &parameters, &mut reading, gpu))??;
            }
        }
        if let Some(saved) = &state.power_sgd {
            self.gradients.restore_compression(saved, &mut reading)?;
        }
        if let Some(scale) = state.loss_scale {
            self.restore_loss_scale(scale)?;
        }
        Ok(reading.missing)
    }

    /// Reads what this rank holds of a parameter.
    fn restore_value(&self, parameter: &Parameter, reading: &mut Reading<'_>) -> Result<()> {
        let count = parameter.info.elements();
        let (rank, world) = self.mesh.place();
        let elements = match &parameter.home {
            Home::Shard { .. } => chunk_of(count, rank, world),
            Home::Tensor | Home::Beside(_) | Home::Unbuilt => 0..count,
        };
        let mut values = vec![0.0; elements.len()];
        if reading.fill(&parameter.info, StatePiece::VALUE, elements, &mut values)? {
            parameter.assign_held(&values)?;
        }
        Ok(())
    }
}

/// A source being read from, and what it turned out not to have.
pub(crate) struct Reading<'a> {
    source: &'a mut dyn StateSource,
    missing: Vec<String>,
}

impl Reading<'_> {
    /// Fills `values` if the source has them.
    pub(crate) fn fill(
        &mut self,
        info: &ParameterInfo,
        what: &str,
        elements: Range<usize>,
        values: &mut [f32],
    ) -> Result<bool> {
        let name = &info.name;
        let is_there = self
            .source
            .read(info, what, elements, values)
            .map_err(|source| Error::Restore {
                name: name.clone(),
                what: what.into(),
                source,
            })?;
        if !is_there {
            let written = format!("{name} ({what})");
            if !self.missing.contains(&written) {
                self.missing.push(written);
            }
        }
        Ok(is_there)
    }
}

/// Visits this rank's chunk of a parameter's values.
fn visit_value(
    parameter: &Parameter,
    (rank, world): (usize, usize),
    visit: &mut dyn FnMut(StatePiece<'_>) -> Result<()>,
) -> Result<()> {
    let elements = chunk_of(parameter.info.elements(), rank, world);
    if elements.is_empty() {
        return Ok(());
    }
    let within = 0..elements.len();
    parameter.with_master(Intent::Read, &elements, within, |master| {
        let values = match &master {
            Master::Apart { masters, .. } => Elements::F32(masters),
            Master::Itself(values) => values.shared(),
        };
        visit(StatePiece {
            info: &parameter.info,
            what: StatePiece::VALUE,
            shape: &parameter.info.shape,
            elements: elements.clone(),
            values,
            is_trained: parameter.is_trained,
        })
    })?
}
