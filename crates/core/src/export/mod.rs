//! Weights for other programs: safetensors files as HuggingFace's libraries write and read them.
//!
//! A checkpoint is in pieces that only Sconce knows; [`Checkpoint::export_weights`](crate::Checkpoint::export_weights) makes a
//! model of it. Tensors that a program has itself are written by [`export_tensors`], adapters among them by [`export_peft`].
//! Either way the header comes first and the values follow tensor by tensor, so that memory is bounded by one of them, and
//! [`NewFolder`] makes a folder appear whole or not at all.

mod error;
mod new_folder;
mod peft;
mod shards;
mod tensors;
mod weight_files;

pub use error::ExportError;
pub use new_folder::NewFolder;
pub use peft::{PeftConfig, PeftType, export_peft};
pub use shards::MAX_SHARD_SIZE;
pub use tensors::export_tensors;
pub use weight_files::{ExportedTensor, Library, write_weight_files};
