//! What Adam and AdamW share: running moments of the gradient, kept and used in one pass over all streams.

use super::elements::for_each_element;
use super::instruction_sets::for_each_instruction_set;
use super::{Gradient, StateSlices, StepKernel, Update, Values, in_range};
use crate::Result;

/// Returns the names of the state arrays, which are PyTorch's.
pub(super) fn state_names(amsgrad: bool) -> &'static [&'static str] {
    if amsgrad {
        &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    } else {
        &["exp_avg", "exp_avg_sq"]
    }
}

/// The settings that both rules have; see their fields.
pub(super) struct Settings {
    pub(super) learning_rate: f64,
    pub(super) beta1: f64,
    pub(super) beta2: f64,
    pub(super) epsilon: f64,
    pub(super) weight_decay: f64,
    pub(super) bias_correction: bool,
}

/// How weight decay enters.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Decay {
    /// The parameter shrinks by the learning rate times the decay.
    Decoupled,
    /// The gradient grows by the decay times the parameter.
    Penalty,
}

impl Settings {
    pub(super) fn check(&self) -> Result<()> {
        let (rate, decay) = (self.learning_rate, self.weight_decay);
        in_range("learning_rate", rate, "0 or more", rate >= 0.0)?;
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            in_range(name, beta, "0 or more and less than 1", (0.0..1.0).contains(&beta))?;
        }
        in_range("epsilon", self.epsilon, "0 or more", self.epsilon >= 0.0)?;
        in_range("weight_decay", decay, "0 or more", decay >= 0.0)
    }

    /// Updates one piece; with a third state array, the largest second moment so far is the one used.
    pub(super) fn update(
        &self,
        decay: Decay,
        update: &Update,
        values: Values<'_>,
        gradient: Gradient<'_>,
        state: StateSlices<'_>,
    ) {
        let [first, second, largest] = state.0;
        let factors = self.factors(decay, update);
        if !largest.is_empty() {
            with_largest(&factors, values, gradient, first, second, largest);
        } else if decay == Decay::Penalty {
            with_penalty(&factors, values, gradient, first, second);
        } else {
            decoupled(&factors, values, gradient, first, second);
        }
    }

    /// Returns the kernel that does so.
    pub(super) fn kernel(&self, decay: Decay, update: &Update, uses_largest: bool) -> StepKernel {
        let (name, arrays) = match decay {
            _ if uses_largest => ("step_adam_largest", 3),
            Decay::Penalty => ("step_adam_penalty", 2),
            Decay::Decoupled => ("step_adam_decoupled", 2),
        };
        let f = self.factors(decay, update);
        let (root, epsilon) = (f.inverse_root_correction, f.epsilon);
        let (first, second) = ([f.beta1, f.rest1], [f.beta2, f.rest2]);
        let factors = [
            f.keep,
            f.penalty,
            first[0],
            first[1],
            second[0],
            second[1],
            f.step_size,
            root,
            epsilon,
            f.scale,
        ];
        StepKernel::new(name, arrays, factors)
    }

    fn factors(&self, decay: Decay, update: &Update) -> Factors {
        let correction = |beta: f64| {
            if self.bias_correction {
                1.0 - beta.powf(update.step as f64)
            } else {
                1.0
            }
        };
        let (keep, penalty) = match decay {
            Decay::Decoupled => (1.0 - update.learning_rate * self.weight_decay, 0.0),
            Decay::Penalty => (1.0, self.weight_decay),
        };
        Factors {
            keep: keep as f32,
            penalty: penalty as f32,
            beta1: self.beta1 as f32,
            rest1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            rest2: (1.0 - self.beta2) as f32,
            step_size: (update.learning_rate / correction(self.beta1)) as f32,
            inverse_root_correction: (1.0 / correction(self.beta2).sqrt()) as f32,
            epsilon: self.epsilon as f32,
            scale: update.gradient_scale,
        }
    }
}

/// The step's constants, computed in f64.
struct Factors {
    keep: f32,
    penalty: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    step_size: f32,
    inverse_root_correction: f32,
    epsilon: f32,
    scale: f32,
}

for_each_instruction_set! {
    fn decoupled(f: &Factors, values: Values<'_>, gradient: Gradient<'_>, first: &mut [f32], second: &mut [f32]) {
        for_each_element(values, gradient, [first, second], |p, g, [m, v]| {
            average(f, g * f.scale, m, v);
            *p = *p * f.keep - change(f, *m, *v);
        });
    }
}

for_each_instruction_set! {
    fn with_penalty(f: &Factors, values: Values<'_>, gradient: Gradient<'_>, first: &mut [f32], second: &mut [f32]) {
        for_each_element(values, gradient, [first, second], |p, g, [m, v]| {
            average(f, g * f.scale + f.penalty * *p, m, v);
            *p -= change(f, *m, *v);
        });
    }
}

for_each_instruction_set! {
    fn with_largest(
        f: &Factors,
        values: Values<'_>,
        gradient: Gradient<'_>,
        first: &mut [f32],
        second: &mut [f32],
        largest: &mut [f32],
    ) {
        for_each_element(values, gradient, [first, second, largest], |p, g, [m, v, x]| {
            average(f, g * f.scale + f.penalty * *p, m, v);
            // Unlike `max`, this keeps a moment that is not a number.
            *x = if *v <= *x { *x } else { *v };
            *p = *p * f.keep - change(f, *m, *x);
        });
    }
}

#[inline(always)]
fn average(f: &Factors, g: f32, m: &mut f32, v: &mut f32) {
    *m = f.beta1 * *m + f.rest1 * g;
    *v = f.beta2 * *v + f.rest2 * (g * g);
}

#[inline(always)]
fn change(f: &Factors, m: f32, v: f32) -> f32 {
    f.step_size * m / (v.sqrt() * f.inverse_root_correction + f.epsilon)
}
