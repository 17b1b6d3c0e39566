//! Models written as one would read them in a paper: what is computed, never how it is distributed.
//!
//! Each model takes its parameters from a [`candle_nn::VarBuilder`] under the names of the HuggingFace
//! implementation, so that a model folder loads without a conversion and a trained one is written back the same way.

mod cogvideox;
mod llama;
mod llama_config;

pub use cogvideox::{Adapters, CogVideoXConfig, CogVideoXTransformer, VideoInput};
pub use llama::Llama;
pub use llama_config::LlamaConfig;
