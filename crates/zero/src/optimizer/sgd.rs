//! Stochastic gradient descent with momentum.

use super::elements::for_each_element;
use super::instruction_sets::for_each_instruction_set;
use super::{Gradient, OptimizerRule, StateSlices, StepKernel, Update, Values, in_range};
use crate::Result;

/// SGD with L2 penalty, momentum, dampening and Nesterov momentum, by PyTorch's rules.
///
/// With g the gradient plus `weight_decay * p`, t the step from 1: the momentum buffer is `b = g` in the first step and
/// `b = momentum * b + (1 - dampening) * g` afterwards; the direction is `b`, or `g + momentum * b` with Nesterov.
#[derive(Debug, Clone, PartialEq)]
pub struct Sgd {
    /// Learning rate; schedules scale it.
    pub learning_rate: f64,
    /// Momentum; 0 keeps no state.
    pub momentum: f64,
    /// Dampening of the gradient in the momentum buffer.
    pub dampening: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Nesterov momentum; needs momentum and no dampening.
    pub nesterov: bool,
}

impl Default for Sgd {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
        }
    }
}

impl OptimizerRule for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn state_names(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 {
            &[]
        } else {
            &["momentum_buffer"]
        }
    }

    fn base_learning_rate(&self) -> f64 {
        self.learning_rate
    }

    fn check(&self) -> Result<()> {
        in_range(
            "learning_rate",
            self.learning_rate,
            "0 or more",
            self.learning_rate >= 0.0,
        )?;
        in_range("momentum", self.momentum, "0 or more", self.momentum >= 0.0)?;
        in_range(
            "dampening",
            self.dampening,
            "a finite number",
            self.dampening.is_finite(),
        )?;
        in_range("weight_decay", self.weight_decay, "0 or more", self.weight_decay >= 0.0)?;
        if !self.nesterov {
            return Ok(());
        }
        in_range("momentum", self.momentum, "above 0 with nesterov", self.momentum > 0.0)?;
        in_range("dampening", self.dampening, "0 with nesterov", self.dampening == 0.0)
    }

    fn update(&self, update: &Update, parameter: &mut [f32], gradient: &[f32], state: StateSlices<'_>) {
        self.update_values(update, Values::F32(parameter), Gradient::F32(gradient), state);
    }

    fn update_values(&self, update: &Update, values: Values<'_>, gradient: Gradient<'_>, state: StateSlices<'_>) {
        let [buffer, ..] = state.0;
        let factors = self.factors(update);
        if self.momentum == 0.0 {
            plain(factors.rate, factors.decay, factors.scale, values, gradient);
        } else {
            with_momentum(&factors, values, gradient, buffer);
        }
    }

    fn kernel(&self, update: &Update) -> Option<StepKernel> {
        let f = self.factors(update);
        let factors = [f.rate, f.decay, f.scale, f.keep, f.add, f.along, f.gradient];
        Some(match self.momentum {
            0.0 => StepKernel::new("step_sgd", 0, factors),
            _ => StepKernel::new("step_sgd_momentum", 1, factors),
        })
    }
}

impl Sgd {
    fn factors(&self, update: &Update) -> Factors {
        let first = update.step == 1;
        Factors {
            rate: update.learning_rate as f32,
            decay: self.weight_decay as f32,
            scale: update.gradient_scale,
            keep: if first { 0.0 } else { self.momentum as f32 },
            add: if first { 1.0 } else { (1.0 - self.dampening) as f32 },
            along: if self.nesterov { self.momentum as f32 } else { 1.0 },
            gradient: if self.nesterov { 1.0 } else { 0.0 },
        }
    }
}

for_each_instruction_set! {
    fn plain(rate: f32, decay: f32, scale: f32, values: Values<'_>, gradient: Gradient<'_>) {
        for_each_element(values, gradient, [], |p, g, []| *p -= rate * (g * scale + decay * *p));
    }
}

/// The step's constants: `b = keep * b + add * g; p -= rate * (gradient * g + along * b)`.
struct Factors {
    rate: f32,
    decay: f32,
    scale: f32,
    keep: f32,
    add: f32,
    along: f32,
    gradient: f32,
}

for_each_instruction_set! {
    fn with_momentum(f: &Factors, values: Values<'_>, gradient: Gradient<'_>, buffer: &mut [f32]) {
        for_each_element(values, gradient, [buffer], |p, g, [b]| {
            let g = g * f.scale + f.decay * *p;
            *b = f.keep * *b + f.add * g;
            *p -= f.rate * (f.gradient * g + f.along * *b);
        });
    }
}
