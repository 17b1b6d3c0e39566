//! Adam with decoupled weight decay.

use super::{OptimizerRule, StateSlices, Update, in_range};
use crate::Result;

/// AdamW (Loshchilov and Hutter 2019, algorithm 2), with PyTorch's defaults and order of operations.
///
/// With g the gradient, t the step from 1:
/// `p *= 1 - lr * weight_decay; m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g²;`
/// `p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)`.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW {
    /// Learning rate; schedules scale it.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay, multiplied by the learning rate.
    pub weight_decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
        }
    }
}

impl OptimizerRule for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
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
        in_range(
            "beta1",
            self.beta1,
            "0 or more and less than 1",
            (0.0..1.0).contains(&self.beta1),
        )?;
        in_range(
            "beta2",
            self.beta2,
            "0 or more and less than 1",
            (0.0..1.0).contains(&self.beta2),
        )?;
        in_range("epsilon", self.epsilon, "0 or more", self.epsilon >= 0.0)?;
        in_range("weight_decay", self.weight_decay, "0 or more", self.weight_decay >= 0.0)
    }

    fn update(&self, update: &Update, parameter: &mut [f32], gradient: &[f32], state: StateSlices<'_>) {
        let [first, second] = state.0;
        let steps = update.step as f64;
        let correction1 = 1.0 - self.beta1.powf(steps);
        let correction2 = 1.0 - self.beta2.powf(steps);
        let factors = Factors {
            keep: (1.0 - update.learning_rate * self.weight_decay) as f32,
            beta1: self.beta1 as f32,
            rest1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            rest2: (1.0 - self.beta2) as f32,
            step_size: (update.learning_rate / correction1) as f32,
            inverse_root_correction: (1.0 / correction2.sqrt()) as f32,
            epsilon: self.epsilon as f32,
            scale: update.gradient_scale,
        };
        fused(&factors, parameter, gradient, first, second);
    }
}

/// The step's constants, computed in f64.
struct Factors {
    keep: f32,
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    step_size: f32,
    inverse_root_correction: f32,
    epsilon: f32,
    scale: f32,
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma", "aarch64+neon"))]
fn fused(f: &Factors, parameter: &mut [f32], gradient: &[f32], first: &mut [f32], second: &mut [f32]) {
    let moments = first.iter_mut().zip(second.iter_mut());
    for ((p, g), (m, v)) in parameter.iter_mut().zip(gradient).zip(moments) {
        let g = g * f.scale;
        *m = f.beta1 * *m + f.rest1 * g;
        *v = f.beta2 * *v + f.rest2 * (g * g);
        let denominator = v.sqrt() * f.inverse_root_correction + f.epsilon;
        *p = *p * f.keep - f.step_size * *m / denominator;
    }
}
