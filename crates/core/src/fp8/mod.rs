//! Training in fp8: products of linear layers over values of eight bits, with delayed scaling.
//!
//! # What is computed
//!
//! With [`MixedPrecision::Fp8`](crate::deepspeed::MixedPrecision) parameters and activations are bf16 with f32 masters, as with
//! bf16. [`nn::Linear`](crate::nn::Linear) rounds what it multiplies to fp8: input and weight to E4M3, the gradient of its
//! output to E5M2 ([`Fp8Format::Hybrid`]). Products are added up in f32, scaled back and rounded to bf16 once. Biases, norms,
//! softmax, attention and the loss are what they are in bf16. The recipe is that of NVIDIA's Transformer Engine
//! (`DelayedScaling`; Micikevicius et al. 2022, arXiv:2209.05433).
//!
//! **The products are emulated**: values are rounded to the fp8 grid exactly as a cast would, and multiplied as f32, on the
//! CPU. That shows what fp8 does to a model's training, and is slower than bf16. Products in hardware are not made yet; a run
//! on a GPU is refused.
//!
//! # Scales
//!
//! A tensor is multiplied by a scale that takes its greatest magnitude (amax) to the largest number of the format. Delayed
//! scaling takes the amax from the tensors of backwards before: each [`Fp8Layer`] keeps a history for its input, its weight
//! and its gradient. All scales change together, after a backward and never within one, so that a part that is computed
//! again in the backward ([activation checkpointing](sconce_zero::EngineOptions::recompute)) rounds as it did. An amax counts
//! when its product is differentiated: evaluation leaves no trace. Three rules differ from Transformer Engine's:
//!
//! - A tensor without a history is scaled by its own amax, where Transformer Engine takes a scale of 1 and loses what is
//!   below its smallest number.
//! - An amax of 0 or one that is not finite does not enter the history; there the first ages it, the second stops it.
//! - What is infinite becomes NaN, so that it is seen, where a saturating cast makes the largest number of it.
//!
//! Ranks multiply the same weights, so their scales for weights are the same, however parameters are sharded. Amaxes of
//! inputs and gradients differ: [`Fp8Recipe::reduce_amax`], on by default, makes them the greatest over all ranks; otherwise
//! each rank scales by its own.
//!
//! Scales and histories belong to [checkpoints](crate::checkpoint).
//!
//! # Where the mode comes from
//!
//! The model's code says nothing of it. The accelerator's `VarBuilder` knows, and a linear layer that is made from it by
//! [`nn::linear`](crate::nn::linear()) or its relatives asks it for its [`Fp8Layer`]; that is the layer's state and lives as
//! long as it. No scope is needed around the forward, and no thread-local setting can be forgotten. Layers made from tensors
//! ([`nn::Linear::new`](crate::nn::Linear::new), as for tied weights) and candle's own have no such state and compute in bf16,
//! and so do layers that [`Fp8Recipe::layers`] does not contain and those kept in f32.

mod grid;
mod layer;
mod recipe;
mod scaling;
mod var_builder;

pub use layer::{Fp8History, Fp8Layer, Fp8LayerState};
pub use recipe::{AmaxCompute, Fp8Format, Fp8Recipe};
pub use scaling::Fp8Scaling;

pub(crate) use layer::{Quantity, Rounded};
pub(crate) use var_builder::{layer_of, with_scaling};
