//! Layers that can be trained.
//!
//! `candle_nn`'s fast layers (`RmsNorm`, `LayerNorm`, `softmax_last_dim`, `rope`) have no backward and
//! cut the autograd graph without a word: everything before them trains as if frozen. Its
//! differentiable compositions are slow, because candle adds every gradient into a fresh zero tensor.
//! The layers here have the same parameters and results, and a backward of their own:
//!
//! | layer | forward and backward |
//! | --- | --- |
//! | [`softmax`] | over the last dimension |
//! | [`RmsNorm`], [`LayerNorm`] | one pass over each row each way |
//! | [`Linear`] | candle's products; no gradients of frozen parameters, which candle computes always; in [`fp8`](crate::fp8) where the run is |
//! | [`LoraLinear`] | a frozen [`Linear`] with a trained product of thin matrices beside it |
//! | [`Embedding`] | parallel gather, and scatter-add in a fixed order |
//! | [`adaptive_layer_norm`] | a [`LayerNorm`] that is scaled and shifted by sample, in the same pass |
//! | [`RotaryEmbedding`] | reads transposed views in place; pairs of halves or of neighbours, positions of any number of axes |
//! | [`causal_attention`], [`attention`] | grouped-query, without quadratic memory; [`masked_attention`] within windows and documents |
//! | [`swiglu`], [`gelu_tanh`] | `silu(gate) · up`; the tanh approximation of GELU |
//! | [`Dropout`] | the same mask both ways, made from the rank's random state; in any dtype |
//! | [`cross_entropy`] | no `[n, vocab]` temporaries but the gradient |
//! | [`linear_cross_entropy()`] | that of a linear layer's results, which never exist together |
//!
//! On the CPU they are fused kernels for `f32` and `bf16`, which compute in `f32` and round once. Their
//! results have the same bits for any number of threads and, but for the matrix products inside
//! attention, any instruction set. Elsewhere, and for `f16` and `f64`, they are compositions of candle
//! ops, which compute in `f32` too but for matrix products: on a GPU those of `bf16` and `f16` are in
//! that dtype, and attention keeps its scores until the backward pass.
//!
//! Inputs and parameters have one dtype. Two settings of a run change that, and neither changes the dtype of a result:
//! parameters that are [kept in f32](crate::AcceleratorBuilder::keep_in_f32) beside narrower inputs, for which the input is
//! widened and the result rounded, in [`Linear`], the norms and [`Embedding`]; and [`Autocast`](crate::Autocast), within which
//! [`Linear`] and [`causal_attention`] round f32 before they multiply.
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor, Var};
//! use sconce_core::nn::{RmsNorm, cross_entropy};
//!
//! let weight = Var::ones(4, DType::F32, &Device::Cpu)?;
//! let norm = RmsNorm::new(weight.as_tensor().clone(), 1e-5);
//! let xs = Tensor::new(&[[1f32, 2., 3., 4.]], &Device::Cpu)?;
//! let loss = cross_entropy(&norm.forward(&xs)?, &Tensor::new(&[2u32], &Device::Cpu)?, -100)?;
//! assert!(loss.backward()?.get(&weight).is_some());
//! # Ok::<(), candle_core::Error>(())
//! ```

mod adaptive_layer_norm;
mod arguments;
mod attention;
mod causal_mask;
mod cross_entropy;
mod dropout;
mod element;
mod embedding;
mod exponential;
mod fp8_product;
mod gelu;
mod heads;
mod lanes;
mod layer_norm;
mod linear;
mod linear_cross_entropy;
mod lora;
#[allow(unsafe_code, reason = "gemm takes raw pointers; the module page has the proof")]
mod matrix_product;
mod rms_norm;
mod rotary;
mod row_blocks;
mod softmax;
mod swiglu;

pub use adaptive_layer_norm::adaptive_layer_norm;
pub use attention::{attention, causal_attention, masked_attention};
pub use causal_mask::CausalMask;
pub use cross_entropy::cross_entropy;
pub use dropout::Dropout;
#[doc(hidden)]
pub use element::as_compositions;
pub use embedding::{Embedding, embedding};
pub use gelu::gelu_tanh;
pub use layer_norm::{LayerNorm, layer_norm};
pub use linear::{Linear, linear, linear_b, linear_no_bias};
pub use linear_cross_entropy::linear_cross_entropy;
pub(crate) use linear_cross_entropy::loss_block_rows;
pub(crate) use lora::is_adapter_name;
pub use lora::{LoraLinear, LoraOptions, lora_linear};
pub use rms_norm::{RmsNorm, rms_norm};
pub use rotary::RotaryEmbedding;
pub use softmax::softmax;
pub use swiglu::swiglu;
