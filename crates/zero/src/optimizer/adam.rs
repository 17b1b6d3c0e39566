//! Adam with an L2 penalty.

use super::moments::{Decay, Settings, state_names};
use super::{Gradient, OptimizerRule, StateSlices, StepKernel, Update, Values};
use crate::Result;

/// Adam (Kingma and Ba 2015), with PyTorch's defaults and order of operations.
///
/// With g the gradient plus `weight_decay * p`, t the step from 1:
/// `m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g²;`
/// `p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)`.
///
/// What DeepSpeed calls Adam is [`AdamW`](crate::AdamW) unless its `adam_w_mode` is false.
#[derive(Debug, Clone, PartialEq)]
pub struct Adam {
    /// Learning rate; schedules scale it.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Divides both moments by what a constant gradient of 1 would have made of them; false takes them as they are
    /// (DeepSpeed's option).
    pub bias_correction: bool,
    /// Uses the largest second moment so far (Reddi et al. 2018), which is a third state array.
    pub amsgrad: bool,
}

impl Default for Adam {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.0,
            bias_correction: true,
            amsgrad: false,
        }
    }
}

impl Adam {
    fn settings(&self) -> Settings {
        Settings {
            learning_rate: self.learning_rate,
            beta1: self.beta1,
            beta2: self.beta2,
            epsilon: self.epsilon,
            weight_decay: self.weight_decay,
            bias_correction: self.bias_correction,
        }
    }
}

impl OptimizerRule for Adam {
    fn name(&self) -> &'static str {
        "adam"
    }

    fn state_names(&self) -> &'static [&'static str] {
        state_names(self.amsgrad)
    }

    fn base_learning_rate(&self) -> f64 {
        self.learning_rate
    }

    fn check(&self) -> Result<()> {
        self.settings().check()
    }

    fn update(&self, update: &Update, parameter: &mut [f32], gradient: &[f32], state: StateSlices<'_>) {
        self.update_values(update, Values::F32(parameter), Gradient::F32(gradient), state);
    }

    fn update_values(&self, update: &Update, values: Values<'_>, gradient: Gradient<'_>, state: StateSlices<'_>) {
        self.settings().update(Decay::Penalty, update, values, gradient, state);
    }

    fn kernel(&self, update: &Update) -> Option<StepKernel> {
        Some(self.settings().kernel(Decay::Penalty, update, self.amsgrad))
    }
}
