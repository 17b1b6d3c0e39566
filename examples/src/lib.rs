//! What the training programs of Sconce share: models, model folders, text and diffusion.
//!
//! This crate owns models as plain code over a [`candle_nn::VarBuilder`] ([`models`]), reading and writing of
//! HuggingFace model folders ([`huggingface`]), text as rows of token ids ([`text`]), and noise schedules, sampling and encoded
//! videos ([`diffusion`]). Nothing in it may know
//! how training is distributed: a model says what it computes, and the program that trains it says in a few
//! lines where its parameters live.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use sconce_examples::{huggingface::ModelFolder, models::{Llama, LlamaConfig}};
//!
//! # fn main() -> anyhow::Result<()> {
//! let folder = ModelFolder::open(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tiny-llama").as_ref())?;
//! let config = LlamaConfig::from_model_folder(&folder)?;
//! let variables = VarMap::new(); // random weights; a training program loads `folder.weights`
//! let model = Llama::new(&config, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
//! let tokens = Tensor::new(&[[72i64, 101, 108, 108, 111]], &Device::Cpu)?;
//! let loss = model.loss(&tokens, &tokens)?;
//! assert!(loss.to_scalar::<f32>()?.is_finite());
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod diffusion;
pub mod huggingface;
pub mod models;
pub mod report;
pub mod text;
