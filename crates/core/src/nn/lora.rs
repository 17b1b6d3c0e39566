//! A frozen linear layer with a trained product of two thin matrices beside it: LoRA.

use candle_core::{Module, ModuleT, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};
use sconce_zero::{ParameterInfo, ParameterSet};

use super::dropout::Dropout;
use super::linear::{Linear, linear_b};

const NAME: &str = "lora_linear";

/// Settings of a [`LoraLinear`], as those of PEFT's `LoraConfig`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoraOptions {
    /// Rows of A and columns of B: PEFT's `r`.
    pub rank: usize,
    /// The product is multiplied by `alpha / rank`: PEFT's `lora_alpha`.
    pub alpha: f64,
    /// The probability with which an element of A's input is dropped in training: PEFT's `lora_dropout`.
    pub dropout: f32,
    /// Whether the product is multiplied by `alpha / √rank` instead, with which large ranks learn as small ones do (rsLoRA,
    /// Kalajdzievski 2023, arXiv 2312.03732): PEFT's `use_rslora`.
    pub rank_stabilized: bool,
}

impl LoraOptions {
    /// Returns what the product of an adapter is multiplied by.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rank_stabilized { rank.sqrt() } else { rank }
    }
}

impl Default for LoraOptions {
    fn default() -> Self {
        Self {
            rank: 8,
            alpha: 8.0,
            dropout: 0.0,
            rank_stabilized: false,
        }
    }
}

/// A linear layer that is adapted to new data without being changed: `y = x Wᵀ + b + scale · drop(x) Aᵀ Bᵀ` (Hu et al. 2021,
/// arXiv 2106.09685), with the [scale](LoraOptions::scale) `alpha / rank`.
///
/// The input has shape `[.., in]`, the output `[.., out]`, A `[rank, in]` and B `[out, rank]`. Parameters have PEFT's names:
/// `weight` and `bias` of the base, `lora_A.weight` and `lora_B.weight` of the adapter. The base is frozen where the engine is
/// told so: `AcceleratorBuilder::frozen(`[`LoraLinear::base_parameters`]`())`. B begins as zeros, so that training begins
/// with what the base computes.
#[derive(Debug, Clone)]
pub struct LoraLinear {
    base: Linear,
    a: Linear,
    b: Linear,
    scale: f64,
    dropout: Dropout,
}

/// Creates a [`LoraLinear`] whose base is that of [`linear_b`]; A is initialised as in PEFT, uniformly within `1 / √in` (He's
/// rule for a leak of √5).
///
/// # Errors
///
/// Fails for a rank of 0, and when `vb` has no such parameters.
pub fn lora_linear(
    in_dim: usize,
    out_dim: usize,
    bias: bool,
    options: &LoraOptions,
    vb: VarBuilder,
) -> Result<LoraLinear> {
    let rank = options.rank;
    if rank == 0 {
        bail!("{NAME}: expected a rank of at least 1, got 0");
    }
    let bound = (in_dim as f64).sqrt().recip();
    let uniform = Init::Uniform { lo: -bound, up: bound };
    let a = vb.pp("lora_A").get_with_hints((rank, in_dim), "weight", uniform)?;
    let zeros = Init::Const(0.0);
    let b = vb.pp("lora_B").get_with_hints((out_dim, rank), "weight", zeros)?;
    Ok(LoraLinear {
        base: linear_b(in_dim, out_dim, bias, vb)?,
        a: Linear::new(a, None),
        b: Linear::new(b, None),
        scale: options.scale(),
        dropout: Dropout::new(options.dropout),
    })
}

impl LoraLinear {
    /// Returns the set of all adapters' parameters: those of which a part of the name is `lora_A` or `lora_B`.
    pub fn adapter_parameters() -> ParameterSet {
        ParameterSet::matching(is_adapter)
    }

    /// Returns the set of all other parameters, which are frozen where only adapters are trained.
    pub fn base_parameters() -> ParameterSet {
        ParameterSet::matching(|info| !is_adapter(info))
    }

    /// Returns the layer without its adapter.
    pub fn base(&self) -> &Linear {
        &self.base
    }

    /// Returns the weight, of shape `[out, in]`, of the linear layer that computes the same: `W + scale · B A`.
    ///
    /// # Errors
    ///
    /// Failures of candle.
    pub fn merged_weight(&self) -> Result<Tensor> {
        let product = self.b.weight().matmul(self.a.weight())?;
        self.base.weight() + (product * self.scale)?
    }
}

/// Not [`Module`]: whoever calls says whether elements are dropped.
impl ModuleT for LoraLinear {
    /// # Errors
    ///
    /// As [`Linear`].
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        let thin = self.a.forward(&self.dropout.forward(xs, train)?)?;
        // The scale on the narrow side costs least.
        let adapted = self.b.forward(&(thin * self.scale)?)?;
        self.base.forward(xs)? + adapted
    }
}

fn is_adapter(info: &ParameterInfo) -> bool {
    is_adapter_name(&info.name)
}

/// Says whether a parameter is part of an adapter.
pub(crate) fn is_adapter_name(name: &str) -> bool {
    name.split('.').any(|part| part == "lora_A" || part == "lora_B")
}
