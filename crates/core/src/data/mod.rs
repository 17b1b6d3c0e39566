//! Data: data sets, loaders, and which rank sees which samples.
//!
//! A [`DataLoader`] says how to read a [`Dataset`] or a stream ([`IterableDataset`]); prepared by the accelerator it gives
//! one rank its batches. On the way: a [`Sampler`] or a [`BatchSampler`] says what comes in which order (`sampler`,
//! `permutation`, `batch_sampler`), `rounds` deals that to the ranks, `reading` makes batches of it, `prefetch` does so
//! ahead of the loop, and `dispatch` lets rank 0 do it for all.

mod batch_sampler;
mod collate;
mod dataset;
mod dispatch;
mod files;
mod loader;
mod loader_state;
mod permutation;
mod prefetch;
mod prepared;
mod reading;
mod rounds;
mod sampler;
mod source;
mod stream;

pub use batch_sampler::BatchSampler;
pub use collate::{Collate, IndexedSamples};
pub use dataset::{DataError, Dataset, TensorDataset};
pub use files::*;
pub use loader::DataLoader;
pub use loader_state::LoaderState;
pub use prepared::{LoaderIterator, PreparedLoader};
pub(crate) use reading::BatchFacts;
pub use sampler::{RandomSampler, SampleOrder, Sampler, SequentialSampler, SubsetSampler, WeightedSampler};
pub use source::Source;
pub use stream::{IterableDataset, SampleIterator, Stream};
