//! Parts that compute again: their parameters come for that, and gradients come more often than once.

use super::{Moment, Units};
use crate::Result;
use crate::backward_scope::is_of_another;
use crate::recompute::Runs;
use crate::trace::Pass;
use candle_core::Tensor;
use std::collections::BTreeMap;

impl Units {
    /// Makes a part's parameters present to compute it again.
    pub(crate) fn enter_again(&self, part: usize) -> Result<()> {
        let mut state = self.lock();
        if state.units[part].shards.is_empty() {
            return Ok(());
        }
        state.use_shards(part);
        self.run(&mut state, part, Pass::Backward)
    }

    /// Gives a part's parameters up that was computed again and differentiated.
    pub(crate) fn leave_again(&self, part: usize) -> Result<()> {
        let mut state = self.lock();
        state.give_up(part, false)?;
        self.start_ahead(&mut state, Moment::BackwardEnded)
    }

    /// Returns the parameters whose gradients a backward from `root` brings, in their order and as often as it does; what
    /// is computed again brings the gradients of all its trained parameters.
    pub(crate) fn gradients_of(&self, root: &Tensor) -> Vec<usize> {
        self.gradients_at(&root.sorted_nodes())
    }

    fn gradients_at(&self, nodes: &[&Tensor]) -> Vec<usize> {
        let numbers = self.numbers.get_or_init(|| self.parameters.numbers());
        let mut order = Vec::new();
        for node in nodes {
            if let Some(number) = numbers.get(&node.id()) {
                order.push(*number);
            } else if let Some(part) = self.runs.part(node.id()) {
                order.extend(&self.lock().units[part].trained);
            }
        }
        order
    }

    /// Returns how many gradients a backward from `loss` brings each parameter, if that may be more than one.
    pub(crate) fn gradients_to_come(&self, loss: &Tensor) -> Option<Vec<u32>> {
        if !self.parameters.may_recompute() {
            return None;
        }
        let mut counts = vec![0; self.parameters.all().len()];
        self.gradients_of(loss)
            .into_iter()
            .for_each(|parameter| counts[parameter] += 1);
        Some(counts)
    }

    /// Tells the gradients what the backward of a part that was computed again brings, in place of what it counted for.
    ///
    /// Returns false, and tells nothing, if the part's graph reaches other parameters than its own, or runs older than
    /// number `first`.
    pub(crate) fn expect_of(&self, part: usize, root: &Tensor, first: u64) -> Result<bool> {
        let nodes = root.sorted_nodes();
        if !self.is_closed(part, &nodes, first) {
            return Ok(false);
        }
        if is_of_another(&self.gradients) {
            return Ok(true);
        }
        let mut changes = BTreeMap::new();
        for parameter in self.gradients_at(&nodes) {
            *changes.entry(parameter).or_insert(0i64) += 1;
        }
        for parameter in &self.lock().units[part].trained {
            *changes.entry(*parameter).or_insert(0i64) -= 1;
        }
        let changes: Vec<_> = changes.into_iter().filter(|(_, change)| *change != 0).collect();
        let complete = self.gradients.correct(&changes)?;
        complete
            .into_iter()
            .try_for_each(|parameter| self.gradient_came(parameter))?;
        Ok(true)
    }

    fn is_closed(&self, part: usize, nodes: &[&Tensor], first: u64) -> bool {
        let numbers = self.numbers.get_or_init(|| self.parameters.numbers());
        let state = self.lock();
        let trained = &state.units[part].trained;
        nodes.iter().all(|node| match numbers.get(&node.id()) {
            Some(parameter) => trained.contains(parameter),
            None => !self.runs.is_before(node.id(), first),
        })
    }

    /// Returns a part's name.
    pub(crate) fn name(&self, part: usize) -> String {
        let (parts, _) = self.parameters.units();
        parts.get(part).map_or_else(String::new, |part| part.name.clone())
    }

    /// Returns the runs in graphs of parts that compute again.
    pub(crate) fn runs(&self) -> &Runs {
        &self.runs
    }
}
