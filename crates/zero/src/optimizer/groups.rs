//! Rules of their own for sets of parameters.

use super::{Gradient, OptimizerRule, StateSlices, Update, Values};
use crate::{Error, ParameterInfo, ParameterSet, Result};

/// Several rules for one model: PyTorch's parameter groups.
///
/// A parameter follows the rule of the first set that contains it, in the order in which they were added, and else the
/// one that [`ParameterGroups::new`] was given. That one's learning rate is the optimizer's: schedules and
/// [`Engine::step`](crate::Engine::step) set it, and every other rule's rate stays in proportion to it, as with PyTorch's
/// `LambdaLR`.
///
/// All rules must keep the same state: groups may mix AdamW and Adam, but not AdamW and Lion.
///
/// ```
/// use sconce_zero::{AdamW, OptimizerRule, ParameterGroups, ParameterSet};
///
/// let decayed = AdamW { learning_rate: 3e-4, weight_decay: 0.1, ..AdamW::default() };
/// let rest = AdamW { weight_decay: 0.0, ..decayed.clone() };
/// let head = AdamW { learning_rate: 3e-3, ..decayed.clone() };
/// let rule = ParameterGroups::new(decayed)
///     .with(ParameterSet::norms_and_biases(), rest)
///     .with(ParameterSet::matching(|parameter| parameter.name.starts_with("head.")), head);
/// rule.check()?;
/// # Ok::<(), sconce_zero::Error>(())
/// ```
#[derive(Debug)]
pub struct ParameterGroups {
    rest: Box<dyn OptimizerRule>,
    groups: Vec<ParameterGroup>,
}

/// A set of parameters and its rule.
#[derive(Debug)]
pub struct ParameterGroup {
    parameters: ParameterSet,
    rule: Box<dyn OptimizerRule>,
}

impl ParameterGroups {
    /// Makes groups with the rule for parameters that no set contains.
    pub fn new(rest: impl OptimizerRule + 'static) -> Self {
        Self {
            rest: Box::new(rest),
            groups: Vec::new(),
        }
    }

    /// Adds a set with its rule, after those there are.
    #[must_use]
    pub fn with(mut self, parameters: ParameterSet, rule: impl OptimizerRule + 'static) -> Self {
        self.groups.push(ParameterGroup {
            parameters,
            rule: Box::new(rule),
        });
        self
    }

    /// Fails unless a group's rule can stand beside the rule for the rest.
    fn check_group(&self, rule: &dyn OptimizerRule) -> Result<(), String> {
        rule.check().map_err(|error| error.to_string())?;
        if !rule.groups().is_empty() {
            return Err("it has groups of its own; add them all to one ParameterGroups".into());
        }
        let state = |rule: &dyn OptimizerRule| {
            let kept = rule.state_names().iter().zip(rule.initial_state());
            kept.map(|(name, initial)| (*name, initial.to_bits()))
                .collect::<Vec<_>>()
        };
        if state(rule) != state(&*self.rest) {
            return Err(format!(
                "it keeps {}, the rule for the rest ({}) keeps {}; all rules of one model must keep the same",
                describe_state(rule),
                self.rest.name(),
                describe_state(&*self.rest)
            ));
        }
        if self.rest.base_learning_rate() == 0.0 && rule.base_learning_rate() != 0.0 {
            return Err(format!(
                "its learning rate is {}, that for the rest is 0, and their proportion would be kept; give the rest \
                 a rate above 0, or freeze it",
                rule.base_learning_rate()
            ));
        }
        Ok(())
    }
}

impl OptimizerRule for ParameterGroups {
    fn name(&self) -> &'static str {
        self.rest.name()
    }

    fn state_names(&self) -> &'static [&'static str] {
        self.rest.state_names()
    }

    fn initial_state(&self) -> [f32; StateSlices::MOST] {
        self.rest.initial_state()
    }

    fn base_learning_rate(&self) -> f64 {
        self.rest.base_learning_rate()
    }

    fn check(&self) -> Result<()> {
        self.rest.check()?;
        for (number, group) in self.groups.iter().enumerate() {
            self.check_group(&*group.rule).map_err(|reason| Error::ParameterGroup {
                number: number + 1,
                rule: group.rule.name(),
                reason,
            })?;
        }
        Ok(())
    }

    fn groups(&self) -> &[ParameterGroup] {
        &self.groups
    }

    fn update(&self, update: &Update, parameter: &mut [f32], gradient: &[f32], state: StateSlices<'_>) {
        self.rest.update(update, parameter, gradient, state);
    }

    fn update_values(&self, update: &Update, values: Values<'_>, gradient: Gradient<'_>, state: StateSlices<'_>) {
        self.rest.update_values(update, values, gradient, state);
    }
}

/// Returns the group of every parameter, by number from 1; 0 is the rest.
pub(crate) fn assign<'a>(rule: &dyn OptimizerRule, parameters: impl Iterator<Item = &'a ParameterInfo>) -> Vec<usize> {
    let groups = rule.groups();
    let first = |parameter: &ParameterInfo| groups.iter().position(|group| group.parameters.contains(parameter));
    parameters
        .map(|parameter| first(parameter).map_or(0, |number| number + 1))
        .collect()
}

/// Returns the rules by the number of their group, each with its learning rate when that of the rest is `learning_rate`.
pub(crate) fn rules_at(rule: &dyn OptimizerRule, learning_rate: f64) -> Vec<(&dyn OptimizerRule, f64)> {
    let base = rule.base_learning_rate();
    let of_group = |group: &'_ ParameterGroup| {
        let own = group.rule.base_learning_rate();
        // The quotient is 1 to the last bit where the rate is the base.
        if own == base {
            learning_rate
        } else {
            own * (learning_rate / base)
        }
    };
    let groups = rule.groups().iter().map(|group| (&*group.rule, of_group(group)));
    std::iter::once((rule, learning_rate)).chain(groups).collect()
}

/// Warns of groups to which no trained parameter belongs: most likely a mistake in the set's rule.
pub(crate) fn warn_of_empty(rule: &dyn OptimizerRule, used: &[usize]) {
    for number in empty(rule, used) {
        let name = rule.groups()[number - 1].rule.name();
        tracing::warn!(
            "parameter group {number} ({name}) has no parameter: its set contains no trained parameter of the model, or \
             groups before it have taken them"
        );
    }
}

/// Returns the numbers of groups that are not among those used.
fn empty(rule: &dyn OptimizerRule, used: &[usize]) -> Vec<usize> {
    (1..=rule.groups().len())
        .filter(|group| !used.contains(group))
        .collect()
}

fn describe_state(rule: &dyn OptimizerRule) -> String {
    let kept = rule.state_names().iter().zip(rule.initial_state());
    let words: Vec<_> = kept.map(|(name, initial)| format!("{name} from {initial}")).collect();
    if words.is_empty() {
        "no state".into()
    } else {
        words.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Adam, AdamW};

    fn named(name: &'static str) -> ParameterSet {
        ParameterSet::matching(move |parameter| parameter.name == name)
    }

    #[test]
    fn the_first_set_that_contains_a_parameter_has_it_and_empty_groups_are_found() {
        let rule = ParameterGroups::new(AdamW::default())
            .with(named("a"), Adam::default())
            .with(named("nothing"), AdamW::default())
            .with(
                ParameterSet::matching(|parameter| parameter.name.as_str() <= "b"),
                AdamW::default(),
            )
            .with(named("a"), AdamW::default());
        let infos = ["a", "b", "c"].map(|name| ParameterInfo {
            name: name.into(),
            shape: vec![1],
        });
        let assigned = assign(&rule, infos.iter());
        assert_eq!(assigned, [1, 3, 0]);
        assert_eq!(empty(&rule, &assigned), [2, 4]);
    }

    #[test]
    fn rates_stay_in_proportion_and_equal_ones_have_the_very_rate() {
        let with_rate = |learning_rate| AdamW {
            learning_rate,
            ..AdamW::default()
        };
        let rule = ParameterGroups::new(with_rate(0.3))
            .with(named("a"), with_rate(0.3))
            .with(named("b"), with_rate(0.1))
            .with(named("c"), with_rate(0.0));
        let rates = |rate| rules_at(&rule, rate).iter().map(|(_, rate)| *rate).collect::<Vec<_>>();
        assert_eq!(rates(0.3), [0.3, 0.3, 0.1, 0.0]);
        assert_eq!(rates(0.7), [0.7, 0.7, 0.1 * (0.7 / 0.3), 0.0]);
        let frozen = ParameterGroups::new(with_rate(0.0)).with(named("a"), with_rate(0.0));
        frozen.check().unwrap();
        assert!(rules_at(&frozen, 0.5).iter().all(|(_, rate)| *rate == 0.5));
    }
}
