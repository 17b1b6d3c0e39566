//! Models written as one would read them in a paper: what is computed, never how it is distributed.
//!
//! Each model takes its parameters from a [`candle_nn::VarBuilder`] under the names of the HuggingFace
//! implementation, so that a model folder loads without a conversion and a trained one is written back the same way.

mod cogvideox;
mod config_file;
mod llama;
mod llama_adapters;
mod llama_config;
mod rope_file;
mod rope_scaling;
mod rotary_tables;

pub use cogvideox::{Adapters, CogVideoXConfig, CogVideoXTransformer, VideoInput};
pub use llama::{Llama, Reading};
pub use llama_adapters::LlamaAdapters;
pub use llama_config::{Family, LlamaConfig};
pub use rope_scaling::RopeScaling;
