//! Data: data sets, loaders, and which rank sees which samples.

mod dataset;
mod loader;
mod order;

pub use dataset::{Dataset, TensorDataset};
pub use loader::{DataLoader, LoaderIterator, PreparedLoader};
