//! Parameters that are there outside of a unit's forward and backward: for a scope, or until they are given up.

use super::Units;
use crate::Result;
use crate::parameter::Home;

impl Units {
    /// Runs `work` while the shards of some parameters are present; called by all ranks.
    pub(crate) fn with_present<R>(&self, parameters: &[usize], work: impl FnOnce() -> Result<R>) -> Result<R> {
        let all = self.parameters.all();
        let sharded = |number: &usize| matches!(all[*number].home, Home::Shard { .. });
        if !parameters.iter().any(sharded) {
            return work();
        }
        let numbers;
        {
            let mut state = self.ready()?;
            let state = &mut *state;
            numbers = state.shards_of(parameters.iter().map(|number| &all[*number].home));
            state.trace.interrupt();
            numbers.iter().for_each(|shard| state.shards[*shard].users += 1);
            numbers.iter().try_for_each(|shard| self.start(state, *shard))?;
            numbers.iter().try_for_each(|shard| state.wait(*shard))?;
        }
        let outcome = work();
        let mut state = self.lock();
        numbers.iter().for_each(|shard| state.shards[*shard].users -= 1);
        state.release_unused()?;
        outcome
    }

    /// Makes a unit's parameters present and keeps them; called by all ranks.
    pub(crate) fn hold(&self, unit: usize) -> Result<()> {
        let mut state = self.ready()?;
        let state = &mut *state;
        if !std::mem::replace(&mut state.units[unit].is_held, true) {
            state.use_shards(unit);
            let shards = state.units[unit].shards.clone();
            shards.iter().try_for_each(|shard| self.start(state, *shard))?;
            shards.iter().try_for_each(|shard| state.wait(*shard))?;
        }
        Ok(())
    }

    /// Gives up what [`Units::hold`] kept.
    pub(crate) fn let_go(&self, unit: usize) -> Result<()> {
        let mut state = self.ready()?;
        if std::mem::replace(&mut state.units[unit].is_held, false) {
            state.give_up(unit, false)?;
        }
        Ok(())
    }
}
