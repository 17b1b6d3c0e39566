//! Model folders as HuggingFace's libraries write them.
//!
//! A folder that was downloaded is input from strangers: [`ModelFolder::open`] checks that what it says about itself is
//! true before anything is loaded. A folder that is written appears whole or not at all ([`write_model_folder`]), so
//! that an interrupted run never leaves something that looks like a model.

mod model_folder;
mod safetensors_header;
mod shard_index;
mod write_model_folder;

pub use model_folder::ModelFolder;
pub use write_model_folder::{check_model_folder_is_free, write_model_folder};
