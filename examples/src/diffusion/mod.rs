//! Diffusion as CogVideoX has it: the noise schedule and its loss, sampling, and training data as tensors on disk.

mod contact_sheet;
mod ddim_sampler;
mod noise_schedule;
mod normal_noise;
mod sample_video;
mod velocity_loss;
mod video_samples;

pub use contact_sheet::contact_sheet;
pub use ddim_sampler::DdimSampler;
pub use noise_schedule::NoiseSchedule;
pub use normal_noise::{Draw, normal_noise};
pub use sample_video::{Prompt, sample_video};
pub use velocity_loss::{fill_patches, velocity_loss};
pub use video_samples::{VideoBatch, VideoSamples};
