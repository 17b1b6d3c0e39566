//! Data: data sets, loaders, and which rank sees which samples.
//!
//! A [`DataLoader`] says how to read; prepared by the accelerator it gives one rank its batches:
//!
//! ```
//! use sconce_core::{DataLoader, IterableDataset};
//! use sconce_core::data::{DataError, SampleIterator};
//!
//! /// A stream of pairs, such as lines of a log.
//! struct Pairs;
//!
//! impl IterableDataset for Pairs {
//!     type Sample = (Vec<f32>, u32);
//!
//!     fn samples(&self, _epoch: u64) -> Result<SampleIterator<Self::Sample>, DataError> {
//!         Ok(Box::new((0..10).map(|number| Ok((vec![number as f32; 3], number)))))
//!     }
//! }
//!
//! let acc = sconce_core::accelerator()?;
//! let mut loader = acc.prepare_loader(DataLoader::stream(Pairs, 4))?;
//! let mut seen = 0;
//! for batch in &mut loader {
//!     let (rows, numbers) = batch?; // tensors [batch, 3] and [batch]
//!     let scores = rows.sum(1)?;
//!     let (scores, numbers) = acc.gather_for_metrics(&(scores, numbers))?;
//!     assert_eq!(scores.dims(), numbers.dims());
//!     seen += numbers.dim(0)?;
//! }
//! assert_eq!(seen, 10); // on every rank, however many there are
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | to read | is |
//! | --- | --- |
//! | tensors in memory | [`TensorDataset`] |
//! | samples in memory | a `Vec` of what can be [collated](Collate) |
//! | samples made by number | [`IndexedSamples`], or a [`Dataset`] of your own |
//! | a stream | an [`IterableDataset`] of your own, with [`DataLoader::stream`] |
//! | files | [`JsonLines`], [`TextLines`], [`SafetensorsRows`], `ParquetRows` with the feature `parquet` |
//!
//! # Which rank gets what
//!
//! In every step the ranks together take the next `batch_size` * ranks samples of the order, or `batch_size` with
//! [`split_batches`](DataLoader::split_batches); rank r takes the r-th part. So the number of ranks does not change what
//! a step sees, if `batch_size` * ranks stays the same. What becomes of samples at the end that do not fill a step:
//!
//! | | every rank gets |
//! | --- | --- |
//! | by default | a full batch, filled up with the first samples of the epoch |
//! | [`drop_last`](DataLoader::drop_last) | nothing of them |
//! | [`even_batches(false)`](DataLoader::even_batches) | what there is: a short batch, or none |
//! | [`dispatch_batches`](DataLoader::dispatch_batches) | an equal part, filled up so that the parts are equal |
//!
//! Orders, batches, lengths and remainders are those of Accelerate 1.15, shuffling that of its seedable sampler, which
//! is PyTorch's; the tests compare with its tables. Differences: a sample that fills up is never counted by
//! `gather_for_metrics`, also in streams, behind skipped batches and in batches of varying size; a skip is for one epoch;
//! an epoch without any batch is an error where that can be known before.
//!
//! # Inside
//!
//! A [`Sampler`] or [`BatchSampler`] says what comes in which order (`sampler`, `permutation`, `batch_sampler`); `rounds`
//! deals that to the ranks; `reading` makes batches of it; `prefetch` does so ahead of the loop; `dispatch` lets rank 0 do
//! it for all; `prepared` is what the loop sees.

mod batch_sampler;
mod collate;
mod dataset;
mod dispatch;
mod files;
mod loader;
mod loader_state;
mod permutation;
mod position;
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
