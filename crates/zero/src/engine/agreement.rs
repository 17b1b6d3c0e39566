//! What all ranks check together before training: that they have one model, and can place it.

use super::Engine;
use crate::parameter::Parameter;
use crate::{Error, Placement, Residence, Result, Tier};

impl Engine {
    /// Checks that all ranks built one model, in the same groups, and can place it; gives all of them rank 0's values.
    pub(super) fn complete_model(&self, parameters: &[Parameter], groups: &[usize]) -> Result<()> {
        if parameters.is_empty() {
            return Err(Error::Order {
                what: "setting an optimizer",
                hint: "build the model from this engine's var_builder first: it has no parameters yet",
            });
        }
        self.check_placements(parameters)?;
        self.check_same_model(parameters, groups)?;
        parameters
            .iter()
            .try_for_each(|parameter| parameter.synchronise(&self.mesh))?;
        self.units.make_ready()
    }

    fn check_placements(&self, parameters: &[Parameter]) -> Result<()> {
        for parameter in parameters {
            // What the strategy asks for, also where it does not come into force.
            let reason = match self.strategy.place(&parameter.info) {
                Placement {
                    parameter: Residence::Sharded,
                    optimizer_state: Residence::Replicated,
                    ..
                } => "a sharded parameter is updated by shares; shard its optimizer state too",
                Placement {
                    optimizer_state_tier: Tier::Disk,
                    ..
                }
                | Placement {
                    parameter_tier: Tier::Disk,
                    ..
                } if self.options.disk.is_none() => "state on disk needs a folder: set EngineOptions::disk",
                Placement {
                    gradient: Residence::Sharded,
                    optimizer_state: Residence::Replicated,
                    ..
                } => "replicated optimizer state needs the whole gradient; shard both, or only the optimizer state",
                _ => continue,
            };
            return Err(Error::UnsupportedPlacement {
                strategy: self.strategy.name().into(),
                name: parameter.info.name.clone(),
                reason,
            });
        }
        Ok(())
    }

    /// Compares names and shapes with rank 0's; all ranks report the first rank that differs.
    fn check_same_model(&self, parameters: &[Parameter], groups: &[usize]) -> Result<()> {
        let describe = |(parameter, group): (&Parameter, &usize)| match group {
            0 => parameter.describe(),
            group => format!("{} in parameter group {group}", parameter.describe()),
        };
        let ours: Vec<String> = parameters.iter().zip(groups).map(describe).collect();
        let text = self.broadcast_text(&ours.join("\n"), 0)?;
        let expected: Vec<&str> = text.split('\n').collect();
        let differs = |number: &usize| ours.get(*number).map(String::as_str) != expected.get(*number).copied();
        let number = (0..ours.len().max(expected.len())).find(differs);
        let mut numbers = vec![-1; self.mesh.world.size()];
        let own = number.map_or(-1, |number| number as i64);
        self.mesh.world.all_gather(&[own], &mut numbers)?;
        let Some(rank) = numbers.iter().position(|number| *number >= 0) else {
            return Ok(());
        };
        let number = numbers[rank] as usize;
        Err(Error::DifferentModels {
            rank,
            number,
            found: self.broadcast_text(ours.get(number).map_or("nothing", String::as_str), rank)?,
            expected: expected.get(number).copied().unwrap_or("nothing").to_owned(),
        })
    }

    /// Returns the text of rank `root`.
    fn broadcast_text(&self, text: &str, root: usize) -> Result<String> {
        let mut bytes = text.as_bytes().to_vec();
        let mut length = [bytes.len() as i64];
        self.mesh.world.broadcast(&mut length, root)?;
        bytes.resize(length[0] as usize, 0);
        self.mesh.world.broadcast(&mut bytes, root)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}
