//! The section `optimizer`.

use super::error::ConfigError;
use super::precision::is_true;
use super::section::{AutoRule, Section};
use super::{Setting, Warning};
use crate::nearest::nearest;
use sconce_zero::{Adagrad, Adam, AdamW, Lion, OptimizerRule, Sgd};

/// Which optimizer, with which numbers; what a rule does not have stays at its default.
#[derive(Debug, Clone, PartialEq)]
pub struct OptimizerSection {
    /// The update rule.
    pub kind: OptimizerKind,
    /// `lr`.
    pub learning_rate: Setting<f64>,
    /// `betas`: the decays of the first and second moments.
    pub betas: Setting<(f64, f64)>,
    /// `eps`.
    pub epsilon: Setting<f64>,
    /// `weight_decay`.
    pub weight_decay: Setting<f64>,
    /// `bias_correction`, of Adam and AdamW.
    pub bias_correction: bool,
    /// `momentum`, of SGD.
    pub momentum: f64,
    /// `dampening`, of SGD.
    pub dampening: f64,
    /// `nesterov`, of SGD.
    pub nesterov: bool,
}

/// An update rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptimizerKind {
    /// Decay added to the gradient: `"Adam"` with `adam_w_mode` false.
    Adam,
    /// Decoupled decay: `"AdamW"`, and `"Adam"` as DeepSpeed reads it.
    AdamW,
    /// Adagrad.
    Adagrad,
    /// Lion.
    Lion,
    /// SGD with momentum.
    Sgd,
}

const NAMES: [&str; 5] = ["Adam", "AdamW", "Adagrad", "Lion", "SGD"];

/// Those of DeepSpeed that are not here.
const FOREIGN: [&str; 8] = [
    "lamb",
    "onebitadam",
    "zerooneadam",
    "onebitlamb",
    "muadam",
    "muadamw",
    "musgd",
    "muon",
];

impl OptimizerSection {
    /// Makes the update rule.
    ///
    /// # Errors
    /// [`ConfigError::StillAuto`] when a number of the rule is still `"auto"`.
    pub fn rule(&self) -> Result<Box<dyn OptimizerRule>, ConfigError> {
        let learning_rate = self.learning_rate.filled("optimizer.params.lr")?;
        let weight_decay = self.weight_decay.filled("optimizer.params.weight_decay")?;
        let betas = || self.betas.filled("optimizer.params.betas");
        let epsilon = || self.epsilon.filled("optimizer.params.eps");
        Ok(match self.kind {
            OptimizerKind::Adam => Box::new(Adam {
                learning_rate,
                beta1: betas()?.0,
                beta2: betas()?.1,
                epsilon: epsilon()?,
                weight_decay,
                bias_correction: self.bias_correction,
                amsgrad: false,
            }),
            OptimizerKind::AdamW => Box::new(AdamW {
                learning_rate,
                beta1: betas()?.0,
                beta2: betas()?.1,
                epsilon: epsilon()?,
                weight_decay,
                bias_correction: self.bias_correction,
                amsgrad: false,
            }),
            OptimizerKind::Adagrad => Box::new(Adagrad {
                learning_rate,
                weight_decay,
                epsilon: epsilon()?,
                ..Adagrad::default()
            }),
            OptimizerKind::Lion => Box::new(Lion {
                learning_rate,
                beta1: betas()?.0,
                beta2: betas()?.1,
                weight_decay,
            }),
            OptimizerKind::Sgd => Box::new(Sgd {
                learning_rate,
                momentum: self.momentum,
                dampening: self.dampening,
                weight_decay,
                nesterov: self.nesterov,
            }),
        })
    }

    pub(super) fn read(top: &mut Section<'_>) -> Result<Option<Self>, ConfigError> {
        let Some(mut section) = top.child("optimizer", AutoRule::Refused)? else {
            return Ok(None);
        };
        let name = section.required::<String>("type")?;
        let named = match name.to_ascii_lowercase().as_str() {
            "adam" => OptimizerKind::Adam,
            "adamw" => OptimizerKind::AdamW,
            "adagrad" => OptimizerKind::Adagrad,
            "lion" => OptimizerKind::Lion,
            "sgd" => OptimizerKind::Sgd,
            foreign if FOREIGN.contains(&foreign) => {
                return Err(section.unsupported("type", format!("use one of {}", NAMES.join(", "))));
            }
            _ => return Err(section.invalid("type", one_of(&name, &NAMES))),
        };
        let mut optimizer = Self::new(named);
        if let Some(parameters) = section.child("params", AutoRule::Refused)? {
            optimizer.read_parameters(parameters)?;
        } else if named == OptimizerKind::Adam {
            optimizer.kind = OptimizerKind::AdamW;
        }
        section.no_effect(&["legacy_fusion"]);
        section.finish()?;
        Ok(Some(optimizer))
    }

    /// DeepSpeed's and, for SGD, torch's defaults.
    fn new(kind: OptimizerKind) -> Self {
        let (learning_rate, epsilon) = match kind {
            OptimizerKind::Adagrad => (1e-2, 1e-10),
            _ => (1e-3, 1e-8),
        };
        let second_decay = if kind == OptimizerKind::Lion { 0.99 } else { 0.999 };
        Self {
            kind,
            learning_rate: Setting::Given(learning_rate),
            betas: Setting::Given((0.9, second_decay)),
            epsilon: Setting::Given(epsilon),
            weight_decay: Setting::Given(0.0),
            bias_correction: true,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
        }
    }

    fn read_parameters(&mut self, mut section: Section<'_>) -> Result<(), ConfigError> {
        use OptimizerKind::{Adam, AdamW, Lion, Sgd};
        setting(&mut section, "lr", &mut self.learning_rate)?;
        setting(&mut section, "weight_decay", &mut self.weight_decay)?;
        if matches!(self.kind, Adam | AdamW | Lion) {
            if let Some(betas) = section.optional_setting("betas")? {
                self.betas = betas;
            }
            let sound = |beta: f64| (0.0..1.0).contains(&beta);
            let sound = self
                .betas
                .value()
                .is_none_or(|(first, second)| sound(first) && sound(second));
            section.check(sound, "betas", "two numbers from 0 to below 1")?;
        }
        if matches!(self.kind, Adam | AdamW | OptimizerKind::Adagrad) {
            setting(&mut section, "eps", &mut self.epsilon)?;
        }
        if matches!(self.kind, Adam | AdamW) {
            self.bias_correction = section.value("bias_correction", true)?;
            section.refuse("amsgrad", is_true, "remove it; DeepSpeed does not have it either")?;
            let decoupled = section.value("adam_w_mode", true)?;
            if self.kind == Adam && decoupled {
                self.kind = AdamW;
                section.source().warn(Warning::Replaced {
                    path: "optimizer.type".into(),
                    found: "\"Adam\" without \"adam_w_mode\": false".into(),
                    used: "AdamW, with decoupled weight decay as in DeepSpeed,".into(),
                });
            }
        }
        if self.kind == Sgd {
            self.momentum = section.value("momentum", 0.0)?;
            self.dampening = section.value("dampening", 0.0)?;
            self.nesterov = section.value("nesterov", false)?;
        }
        let advice = "remove it and set \"gradient_clipping\" at top level";
        section.refuse("max_grad_norm", |_| true, advice)?;
        section.no_effect(&["torch_adam", "fused", "foreach"]);
        section.finish()
    }
}

fn setting(section: &mut Section<'_>, key: &'static str, place: &mut Setting<f64>) -> Result<(), ConfigError> {
    if let Some(value) = section.optional_setting::<f64>(key)? {
        *place = value;
    }
    section.check(place.value().is_none_or(|value| value >= 0.0), key, "a number from 0")
}

/// Lists the names that are allowed, the most similar one first.
pub(super) fn one_of(name: &str, names: &'static [&'static str]) -> String {
    let list = names.join(", ");
    match nearest(name, names.iter().copied()) {
        Some(nearest) => format!("one of {list}; the nearest is \"{nearest}\""),
        None => format!("one of {list}"),
    }
}
