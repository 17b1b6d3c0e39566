//! A linear layer of a block, with an adapter beside it where one is asked for.

use anyhow::ensure;
use candle_core::{Module, ModuleT, Result, Tensor};
use candle_nn::VarBuilder;
use sconce_core::nn::{Linear, LoraLinear, LoraOptions, linear_b, lora_linear};

/// Which linear layers of a model get LoRA adapters, and of what kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapters {
    options: LoraOptions,
    targets: Vec<String>,
}

impl Adapters {
    /// The layers that can have adapters, by the ends of their names: those of attention, and of the feed-forward network.
    pub const POSSIBLE: [&str; 6] = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"];

    /// Gives adapters to the layers whose names end in one of `targets`, as PEFT's `target_modules`.
    ///
    /// # Errors
    /// If there are none, or one is not among [`Adapters::POSSIBLE`].
    pub fn new(options: LoraOptions, targets: &[String]) -> anyhow::Result<Self> {
        ensure!(
            !targets.is_empty(),
            "no layers are named for adapters, expected some of {:?}",
            Self::POSSIBLE
        );
        for target in targets {
            ensure!(
                Self::POSSIBLE.contains(&target.as_str()),
                "no layer that can have an adapter is called {target:?}, expected some of {:?}",
                Self::POSSIBLE
            );
        }
        Ok(Self {
            options,
            targets: targets.to_vec(),
        })
    }

    /// Rank, scale and dropout.
    pub fn options(&self) -> &LoraOptions {
        &self.options
    }

    /// The ends of the names of layers that have adapters.
    pub fn targets(&self) -> &[String] {
        &self.targets
    }

    fn of<'a>(adapters: Option<&'a Self>, name: &str) -> Option<&'a LoraOptions> {
        let adapters = adapters?;
        let is_meant = adapters.targets.iter().any(|target| target == name);
        is_meant.then_some(&adapters.options)
    }
}

/// A linear layer, trained itself or by its adapter.
#[derive(Debug)]
pub(super) enum Projection {
    Whole(Linear),
    Adapted(LoraLinear),
}

impl Projection {
    /// Creates the layer `name` (of [`Adapters::POSSIBLE`]) from `vb`, which is already at its place.
    pub(super) fn new(
        input: usize,
        output: usize,
        bias: bool,
        name: &str,
        adapters: Option<&Adapters>,
        vb: VarBuilder,
    ) -> Result<Self> {
        Ok(match Adapters::of(adapters, name) {
            Some(options) => Self::Adapted(lora_linear(input, output, bias, options, vb)?),
            None => Self::Whole(linear_b(input, output, bias, vb)?),
        })
    }
}

impl Module for Projection {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Whole(linear) => linear.forward(xs),
            // Adapters of this model have no dropout.
            Self::Adapted(linear) => linear.forward_t(xs, false),
        }
    }
}
