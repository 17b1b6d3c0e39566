//! Rates that shrink with the sum of squared gradients.

use super::elements::for_each_element;
use super::instruction_sets::for_each_instruction_set;
use super::{Gradient, OptimizerRule, StateSlices, StepKernel, Update, Values, in_range};
use crate::Result;

/// Adagrad (Duchi, Hazan and Singer 2011), with PyTorch's defaults and order of operations.
///
/// With g the gradient plus `weight_decay * p`, t the step from 1: `s += g²;`
/// `p -= lr / (1 + (t - 1) * learning_rate_decay) * g / (sqrt(s) + eps)`.
#[derive(Debug, Clone, PartialEq)]
pub struct Adagrad {
    /// Learning rate; schedules scale it.
    pub learning_rate: f64,
    /// Growth of the rate's divisor per step.
    pub learning_rate_decay: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Sum of squares before the first step.
    pub initial_accumulator_value: f32,
    /// Added to the root of the sum.
    pub epsilon: f64,
}

impl Default for Adagrad {
    fn default() -> Self {
        Self {
            learning_rate: 1e-2,
            learning_rate_decay: 0.0,
            weight_decay: 0.0,
            initial_accumulator_value: 0.0,
            epsilon: 1e-10,
        }
    }
}

impl OptimizerRule for Adagrad {
    fn name(&self) -> &'static str {
        "adagrad"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["sum"]
    }

    fn initial_state(&self) -> [f32; StateSlices::MOST] {
        [self.initial_accumulator_value, 0.0, 0.0]
    }

    fn base_learning_rate(&self) -> f64 {
        self.learning_rate
    }

    fn check(&self) -> Result<()> {
        let settings = [
            ("learning_rate", self.learning_rate),
            ("learning_rate_decay", self.learning_rate_decay),
            ("weight_decay", self.weight_decay),
            ("initial_accumulator_value", self.initial_accumulator_value.into()),
            ("epsilon", self.epsilon),
        ];
        settings
            .into_iter()
            .try_for_each(|(name, value)| in_range(name, value, "0 or more", value >= 0.0))
    }

    fn update(&self, update: &Update, parameter: &mut [f32], gradient: &[f32], state: StateSlices<'_>) {
        self.update_values(update, Values::F32(parameter), Gradient::F32(gradient), state);
    }

    fn update_values(&self, update: &Update, values: Values<'_>, gradient: Gradient<'_>, state: StateSlices<'_>) {
        let [sum, ..] = state.0;
        fused(&self.factors(update), values, gradient, sum);
    }

    fn kernel(&self, update: &Update) -> Option<StepKernel> {
        let f = self.factors(update);
        Some(StepKernel::new(
            "step_adagrad",
            1,
            [f.rate, f.decay, f.epsilon, f.scale],
        ))
    }
}

impl Adagrad {
    fn factors(&self, update: &Update) -> Factors {
        let earlier_steps = (update.step - 1) as f64;
        Factors {
            rate: (update.learning_rate / (1.0 + earlier_steps * self.learning_rate_decay)) as f32,
            decay: self.weight_decay as f32,
            epsilon: self.epsilon as f32,
            scale: update.gradient_scale,
        }
    }
}

/// The step's constants, computed in f64.
struct Factors {
    rate: f32,
    decay: f32,
    epsilon: f32,
    scale: f32,
}

for_each_instruction_set! {
    fn fused(f: &Factors, values: Values<'_>, gradient: Gradient<'_>, sum: &mut [f32]) {
        for_each_element(values, gradient, [sum], |p, g, [s]| {
            let g = g * f.scale + f.decay * *p;
            *s += g * g;
            *p -= f.rate * g / (s.sqrt() + f.epsilon);
        });
    }
}
