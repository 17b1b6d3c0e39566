//! Batches that the program makes itself, of any sizes.

/// Puts samples of a [`Dataset`](super::Dataset) into batches; sizes may vary, as where batches are made by length.
///
/// Several ranks get whole batches in turn. Where these do not come out even, some of the first batches are given again,
/// which metrics do not count.
pub trait BatchSampler: Send + Sync + std::fmt::Debug {
    /// Returns the batches of an epoch, none of them empty, as numbers of samples; by `seed` and `epoch` alone.
    fn batches(&self, seed: u64, epoch: u64) -> Vec<Vec<usize>>;
}

/// The same batches in every epoch.
impl BatchSampler for Vec<Vec<usize>> {
    fn batches(&self, _: u64, _: u64) -> Vec<Vec<usize>> {
        self.clone()
    }
}
