//! The CogVideoX video transformer, as in diffusers' `CogVideoXTransformer3DModel`, in the layouts of the 2B and 5B models, of
//! version 1.5, and of image-to-video (Yang et al. 2024, arXiv:2408.06072).
//!
//! Text and patches of noisy latents are one sequence; in each block both attend to all of both, and the time step scales and
//! shifts what either feeds into the block. The parts are files of this folder; none knows how training is distributed.

mod attention;
mod block;
mod config;
mod patches;
mod positions;
mod projection;
mod time_embedding;
mod transformer;

pub use config::CogVideoXConfig;
pub use projection::Adapters;
pub use transformer::{CogVideoXTransformer, VideoInput};
