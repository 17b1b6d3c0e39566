//! Optimizers as fused loops over flat slices: each element of each stream is touched once per step.

mod adagrad;
mod adam;
mod adamw;
mod elements;
mod groups;
mod instruction_sets;
mod lion;
mod moments;
mod pieces;
mod prefetch;
mod rounding;
mod sgd;
mod step_kernel;
mod values;

pub use adagrad::Adagrad;
pub use adam::Adam;
pub use adamw::AdamW;
pub use groups::{ParameterGroup, ParameterGroups};
pub(crate) use groups::{assign, rules_at, warn_of_empty};
pub use lion::Lion;
pub use sgd::Sgd;
pub use step_kernel::StepKernel;
pub use values::{Gradient, HalfMut, Values};

use crate::Result;

/// An update rule that works on any piece of a parameter, element by element.
///
/// State is flat f32, one array per name in [`OptimizerRule::state_names`].
pub trait OptimizerRule: Send + Sync + std::fmt::Debug {
    /// Returns the rule's name, for example `adamw`.
    fn name(&self) -> &'static str;

    /// Returns the names of the state arrays that the rule keeps per element, at most [`StateSlices::MOST`].
    fn state_names(&self) -> &'static [&'static str];

    /// Returns the value that all elements of each state array have before the first step, in the order of the names.
    fn initial_state(&self) -> [f32; StateSlices::MOST] {
        [0.0; StateSlices::MOST]
    }

    /// Returns the learning rate that the user gave.
    fn base_learning_rate(&self) -> f64;

    /// Checks the settings.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) naming the setting, its value and the allowed range.
    fn check(&self) -> Result<()>;

    /// Returns the sets of parameters that have rules of their own, in order of precedence: none but for
    /// [`ParameterGroups`].
    fn groups(&self) -> &[ParameterGroup] {
        &[]
    }

    /// Updates a piece of a parameter. All slices have one length.
    fn update(&self, update: &Update, parameter: &mut [f32], gradient: &[f32], state: StateSlices<'_>);

    /// Updates a piece of a parameter of any form. All slices have one length; state arrays that are not kept are empty.
    ///
    /// What is not f32 goes through [`OptimizerRule::update`] in small pieces: widened before, rounded to nearest (ties
    /// to even) after. A rule whose `update` first computes much that holds for all elements may override this to
    /// compute it once.
    ///
    /// # Panics
    /// If lengths differ.
    fn update_values(&self, update: &Update, values: Values<'_>, gradient: Gradient<'_>, state: StateSlices<'_>) {
        pieces::in_pieces(
            values,
            gradient,
            state,
            &|parameter: &mut [f32], gradient: &[f32], state| {
                self.update(update, parameter, gradient, state);
            },
        );
    }

    /// Returns how a GPU on which the state lies carries out an update; state arrays that are not kept are not looked at.
    ///
    /// `None`: the host runs [`OptimizerRule::update_values`] over the GPU's memory, which is right but slow.
    fn kernel(&self, _update: &Update) -> Option<StepKernel> {
        None
    }
}

/// What holds for all elements of a parameter in one step.
#[derive(Debug, Clone, Copy)]
pub struct Update {
    /// The learning rate of this step.
    pub learning_rate: f64,
    /// How often the parameter has been updated, this time included; steps in which no rank used it do not count.
    pub step: u64,
    /// A factor for the gradients, from clipping.
    pub gradient_scale: f32,
}

/// The pieces of the state arrays that belong to a piece of a parameter.
#[derive(Debug)]
pub struct StateSlices<'a>(pub [&'a mut [f32]; StateSlices::MOST]);

impl<'a> StateSlices<'a> {
    /// Most state arrays of a rule; unused ones are empty slices.
    pub const MOST: usize = 3;

    /// Returns pieces of `size` elements without end: an array that is used up gives empty ones.
    ///
    /// # Panics
    /// If `size` is 0.
    pub fn chunks(self, size: usize) -> impl Iterator<Item = StateSlices<'a>> {
        let mut arrays = self.0.map(|array| array.chunks_mut(size));
        std::iter::repeat_with(move || StateSlices(arrays.each_mut().map(|chunks| chunks.next().unwrap_or_default())))
    }
}

/// Fails unless `value` is in range.
pub(crate) fn in_range(setting: &'static str, value: f64, expected: &'static str, holds: bool) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(crate::Error::Setting {
            setting,
            value: value.to_string(),
            expected,
        })
    }
}
