//! Steps of one size in the direction of an averaged gradient's sign.

use super::elements::for_each_element;
use super::instruction_sets::for_each_instruction_set;
use super::{Gradient, OptimizerRule, StateSlices, StepKernel, Update, Values, in_range};
use crate::Result;

/// Lion (Chen et al. 2023, algorithm 2), with the authors' defaults; decay as in DeepSpeed.
///
/// With g the gradient: `p *= 1 - lr * weight_decay; p -= lr * sign(beta1 * m + (1 - beta1) * g);`
/// `m = beta2 * m + (1 - beta2) * g`. The sign of 0 is 0; what is not a number makes the parameter not a number.
#[derive(Debug, Clone, PartialEq)]
pub struct Lion {
    /// Learning rate, the size of every step; schedules scale it.
    pub learning_rate: f64,
    /// Weight of the momentum in the direction.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Decoupled weight decay, multiplied by the learning rate.
    pub weight_decay: f64,
}

impl Default for Lion {
    fn default() -> Self {
        Self {
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.99,
            weight_decay: 0.0,
        }
    }
}

impl OptimizerRule for Lion {
    fn name(&self) -> &'static str {
        "lion"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg"]
    }

    fn base_learning_rate(&self) -> f64 {
        self.learning_rate
    }

    fn check(&self) -> Result<()> {
        let (rate, decay) = (self.learning_rate, self.weight_decay);
        in_range("learning_rate", rate, "0 or more", rate >= 0.0)?;
        for (name, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            in_range(name, beta, "0 or more and less than 1", (0.0..1.0).contains(&beta))?;
        }
        in_range("weight_decay", decay, "0 or more", decay >= 0.0)
    }

    fn update(&self, update: &Update, parameter: &mut [f32], gradient: &[f32], state: StateSlices<'_>) {
        self.update_values(update, Values::F32(parameter), Gradient::F32(gradient), state);
    }

    fn update_values(&self, update: &Update, values: Values<'_>, gradient: Gradient<'_>, state: StateSlices<'_>) {
        let [momentum, ..] = state.0;
        fused(&self.factors(update), values, gradient, momentum);
    }

    fn kernel(&self, update: &Update) -> Option<StepKernel> {
        let f = self.factors(update);
        let factors = [f.rate, f.keep, f.beta1, f.rest1, f.beta2, f.rest2, f.scale];
        Some(StepKernel::new("step_lion", 1, factors))
    }
}

impl Lion {
    fn factors(&self, update: &Update) -> Factors {
        Factors {
            rate: update.learning_rate as f32,
            keep: (1.0 - update.learning_rate * self.weight_decay) as f32,
            beta1: self.beta1 as f32,
            rest1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            rest2: (1.0 - self.beta2) as f32,
            scale: update.gradient_scale,
        }
    }
}

/// The step's constants, computed in f64.
struct Factors {
    rate: f32,
    keep: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    scale: f32,
}

for_each_instruction_set! {
    fn fused(f: &Factors, values: Values<'_>, gradient: Gradient<'_>, momentum: &mut [f32]) {
        for_each_element(values, gradient, [momentum], |p, g, [m]| {
            let g = g * f.scale;
            let direction = f.beta1 * *m + f.rest1 * g;
            // `signum` of 0 is 1.
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            *p = *p * f.keep - f.rate * sign;
            *m = f.beta2 * *m + f.rest2 * g;
        });
    }
}
