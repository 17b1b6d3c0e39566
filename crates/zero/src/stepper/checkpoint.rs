//! The optimizer's state as pieces of parameters, for checkpoints.

use super::{Group, Stepper};
use crate::bucket::Held;
use crate::device::{FlatMemory, Gpu};
use crate::engine::Reading;
use crate::parameter::Parameter;
use crate::{Elements, OptimizerRule, Result, StatePiece};
use std::ops::Range;

impl Stepper {
    pub(crate) fn rule(&self) -> &dyn OptimizerRule {
        &*self.rule
    }

    /// Returns how often each parameter has been updated.
    pub(crate) fn steps(&self) -> &[u64] {
        &self.steps
    }

    /// Sets how often parameters have been updated, of those of which it is known.
    pub(crate) fn set_steps(&mut self, steps: impl Iterator<Item = Option<u64>>) {
        let known = self.steps.iter_mut().zip(steps);
        known.for_each(|(own, known)| *own = known.unwrap_or(*own));
    }

    /// Visits the state of part `part`, and masters that lie beside it; nothing before the first step.
    pub(crate) fn visit(
        &mut self,
        part: usize,
        buckets: &[Held<'_>],
        parameters: &[Parameter],
        visit: &mut dyn FnMut(StatePiece<'_>) -> Result<()>,
    ) -> Result<()> {
        let names = self.rule.state_names();
        let Some(state) = &mut self.state else { return Ok(()) };
        let mut visit_group = |group: &Group, arrays: &[&[f32]], masters: Option<&[f32]>| -> Result<()> {
            for segment in group.segments.iter().filter(|segment| segment.part == part) {
                let (parameter, elements) = segment.elements(buckets, parameters);
                let named = names.iter().copied().zip(arrays.iter().copied());
                let masters = masters.map(|masters| (StatePiece::VALUE, masters));
                for (what, array) in named.chain(masters).filter(|_| !elements.is_empty()) {
                    visit(StatePiece {
                        info: &parameter.info,
                        what,
                        shape: &parameter.info.shape,
                        elements: elements.clone(),
                        values: Elements::F32(&array[segment.place()]),
                        is_trained: true,
                    })?;
                }
            }
            Ok(())
        };
        for (group, arrays) in &state.in_memory {
            visit_group(group, &arrays.each_ref().map(FlatMemory::as_slice), None)?;
        }
        for disk in &mut state.on_disk {
            // Only read: what `visit` fails with leaves the state on disk as it is.
            for (number, group) in disk.groups.iter().enumerate() {
                let arrays = disk.state.read_group(number)?;
                let (arrays, masters) = arrays.split_at(arrays.len() - usize::from(disk.has_masters));
                visit_group(group, arrays, masters.first().copied())?;
            }
        }
        Ok(())
    }

    /// Returns what [`Stepper::visit`] would visit: parameters by number, arrays and elements.
    pub(crate) fn plan(
        &self,
        part: usize,
        buckets: &[Held<'_>],
        parameters: &[Parameter],
    ) -> Vec<(usize, &'static str, Range<usize>)> {
        let names = self.rule.state_names();
        let mut plan = Vec::new();
        let mut add = |group: &Group, has_masters: bool| {
            for segment in group.segments.iter().filter(|segment| segment.part == part) {
                let (_, elements) = segment.elements(buckets, parameters);
                let number = buckets[segment.bucket].layout.slots[segment.slot].parameter;
                let masters = has_masters.then_some(StatePiece::VALUE);
                let arrays = names.iter().copied().chain(masters).filter(|_| !elements.is_empty());
                plan.extend(arrays.map(|what| (number, what, elements.clone())));
            }
        };
        if let Some(state) = &self.state {
            state.in_memory.iter().for_each(|(group, _)| add(group, false));
            let on_disk = state.on_disk.iter();
            on_disk.for_each(|disk| disk.groups.iter().for_each(|group| add(group, disk.has_masters)));
        }
        plan
    }

    /// Reads the state of all that this rank updates, and masters that lie beside it.
    pub(crate) fn restore(
        &mut self,
        buckets: &[Held<'_>],
        parameters: &[Parameter],
        reading: &mut Reading<'_>,
        gpu: Option<&Gpu>,
    ) -> Result<()> {
        let mut state = match self.state.take() {
            Some(state) => state,
            None => self.new_state(buckets, parameters, gpu)?,
        };
        let names = self.rule.state_names();
        let outcome = state.for_each_group(|group, arrays, mut masters| {
            for segment in &group.segments {
                let (parameter, elements) = segment.elements(buckets, parameters);
                if elements.is_empty() {
                    continue;
                }
                for (what, array) in names.iter().zip(arrays.iter_mut()) {
                    reading.fill(&parameter.info, what, elements.clone(), &mut array[segment.place()])?;
                }
                if let Some(masters) = masters.as_deref_mut() {
                    let masters = &mut masters[segment.place()];
                    if reading.fill(&parameter.info, StatePiece::VALUE, elements.clone(), masters)? {
                        segment.copy_masters(buckets, parameters, masters)?;
                    }
                }
            }
            Ok(())
        });
        self.state = Some(state);
        outcome
    }
}

impl super::Segment {
    /// Returns the parameter, and which of its elements these are.
    fn elements<'p>(&self, buckets: &[Held<'_>], parameters: &'p [Parameter]) -> (&'p Parameter, Range<usize>) {
        let (parameter, chunk) = self.of(buckets, parameters);
        (
            parameter,
            chunk.start + self.within.start..chunk.start + self.within.end,
        )
    }

    /// Gives the values that the model computes with those of masters that lie in the state.
    fn copy_masters(&self, buckets: &[Held<'_>], parameters: &[Parameter], masters: &[f32]) -> Result<()> {
        let (parameter, chunk) = self.of(buckets, parameters);
        let intent = crate::device::Intent::Overwrite;
        parameter.with_master(intent, &chunk, self.within.clone(), |copy| copy.write(masters))
    }
}
