//! LoRA adapters beside the projections of a model.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, ensure};
use candle_core::{DType, ModuleT, Tensor};
use candle_nn::{Module as _, VarBuilder};
use sconce_core::export::PeftConfig;
use sconce_core::nn::{Linear, LoraLinear, LoraOptions, linear_b, lora_linear};

/// Names of the projections that can have adapters.
const PROJECTIONS: [&str; 7] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

/// Which projections of a model have adapters, and of what kind.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaAdapters {
    /// Rank, scale and dropout of each.
    pub options: LoraOptions,
    targets: BTreeSet<String>,
}

impl LlamaAdapters {
    /// Chooses projections by name, such as `q_proj`; `all-linear` means all, as in PEFT.
    ///
    /// # Errors
    /// If there is no name, or one is no projection's.
    pub fn new(options: LoraOptions, targets: &[String]) -> Result<Self> {
        let mut chosen = BTreeSet::new();
        for target in targets {
            if target == "all-linear" {
                chosen.extend(PROJECTIONS.map(str::to_owned));
                continue;
            }
            ensure!(
                PROJECTIONS.contains(&target.as_str()),
                "{target:?} is no projection with an adapter, expected all-linear or some of {}",
                PROJECTIONS.join(", ")
            );
            chosen.insert(target.clone());
        }
        ensure!(
            !chosen.is_empty(),
            "no projections are named; expected some of {}",
            PROJECTIONS.join(", ")
        );
        ensure!(options.rank > 0, "the rank of adapters is 0, expected at least 1");
        ensure!(
            (0.0..1.0).contains(&options.dropout),
            "the dropout of adapters is {}, expected at least 0 and below 1",
            options.dropout
        );
        Ok(Self {
            options,
            targets: chosen,
        })
    }

    /// Returns what PEFT must know to put these adapters beside the base model at `base`, a name or folder.
    pub fn peft_config(&self, base: Option<String>) -> PeftConfig {
        PeftConfig {
            task_type: Some("CAUSAL_LM".to_owned()),
            base_model_name_or_path: base,
            r: self.options.rank,
            lora_alpha: self.options.alpha,
            use_rslora: self.options.rank_stabilized,
            lora_dropout: f64::from(self.options.dropout),
            target_modules: self.targets.iter().cloned().collect(),
            ..PeftConfig::default()
        }
    }

    /// Adds every adapter to its layer's weight (`W + scale · B A`, in f32): named tensors of a model without adapters come
    /// back.
    ///
    /// # Errors
    /// If an adapter is not whole, or its layer has no weight; failures of candle.
    pub fn merge(&self, tensors: Vec<(String, Tensor)>) -> Result<Vec<(String, Tensor)>> {
        let mut by_name = BTreeMap::from_iter(tensors);
        let layers = Vec::from_iter(
            by_name
                .keys()
                .filter_map(|name| name.strip_suffix(".lora_A.weight").map(str::to_owned)),
        );
        for layer in layers {
            let mut take = |part: &str| by_name.remove(&format!("{layer}{part}"));
            let parts = (take(".weight"), take(".lora_A.weight"), take(".lora_B.weight"));
            let (Some(weight), Some(a), Some(b)) = parts else {
                anyhow::bail!("{layer}: expected weight, lora_A.weight and lora_B.weight");
            };
            let product = b.to_dtype(DType::F32)?.matmul(&a.to_dtype(DType::F32)?)?;
            let merged = (weight.to_dtype(DType::F32)? + (product * self.options.scale())?)?;
            by_name.insert(format!("{layer}.weight"), merged.to_dtype(weight.dtype())?);
        }
        Ok(by_name.into_iter().collect())
    }
}

/// A projection of a model: with an adapter, if it was chosen.
#[derive(Debug, Clone)]
pub(super) enum Projection {
    Plain(Linear),
    Adapted(LoraLinear),
}

impl Projection {
    /// Creates the projection `name` of `vb`, `[output, input]`.
    pub(super) fn new(
        (input, output): (usize, usize),
        bias: bool,
        name: &str,
        adapters: Option<&LlamaAdapters>,
        vb: &VarBuilder,
    ) -> candle_core::Result<Self> {
        let vb = vb.pp(name);
        Ok(match adapters.filter(|adapters| adapters.targets.contains(name)) {
            Some(adapters) => Self::Adapted(lora_linear(input, output, bias, &adapters.options, vb)?),
            None => Self::Plain(linear_b(input, output, bias, vb)?),
        })
    }
}

impl ModuleT for Projection {
    fn forward_t(&self, xs: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        match self {
            Self::Plain(linear) => linear.forward(xs),
            Self::Adapted(adapted) => adapted.forward_t(xs, train),
        }
    }
}
