//! What a loader reads from.

use candle_core::{Device, Tensor};

/// Why a data set could not give something: any error will do.
pub type DataError = Box<dyn std::error::Error + Send + Sync>;

/// A data set of samples that can be reached by number.
///
/// Batches are made on a thread of their own, ahead of the loop (see [`DataLoader::prefetch`](super::DataLoader::prefetch)).
/// What is random in making one should be drawn from [`RandomState`](crate::RandomState): there it follows from seed,
/// epoch, rank and the number of the batch.
pub trait Dataset: Send + Sync + 'static {
    /// What the loop gets for a batch.
    type Batch: Send + 'static;

    /// Returns the number of samples.
    fn len(&self) -> usize;

    /// Says whether there are no samples.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes a batch of the samples with these numbers, in this order, on `device`.
    ///
    /// # Errors
    /// Whatever reading a sample may fail with.
    fn batch(&self, samples: &[usize], device: &Device) -> Result<Self::Batch, DataError>;
}

/// Tensors whose rows (dimension 0) are the samples; a batch is the same rows of each.
#[derive(Debug, Clone)]
pub struct TensorDataset {
    tensors: Vec<Tensor>,
}

impl TensorDataset {
    /// Makes a data set of tensors with one number of rows.
    ///
    /// # Errors
    /// When there is no tensor, one has no dimension, or the numbers of rows differ.
    pub fn new(tensors: Vec<Tensor>) -> candle_core::Result<Self> {
        let Some(first) = tensors.first() else {
            candle_core::bail!("a data set needs at least one tensor")
        };
        let rows = first.dim(0)?;
        for (number, tensor) in tensors.iter().enumerate() {
            if tensor.dim(0)? != rows {
                candle_core::bail!("tensor {number} has {} rows, tensor 0 has {rows}", tensor.dim(0)?);
            }
        }
        // Rows are picked by `index_select`, which takes no views.
        let tensors = tensors
            .iter()
            .map(Tensor::contiguous)
            .collect::<candle_core::Result<_>>()?;
        Ok(Self { tensors })
    }
}

impl Dataset for TensorDataset {
    type Batch = Vec<Tensor>;

    fn len(&self) -> usize {
        self.tensors[0].dims()[0]
    }

    fn batch(&self, samples: &[usize], device: &Device) -> Result<Vec<Tensor>, DataError> {
        let numbers = samples.iter().map(|sample| i64::try_from(*sample));
        let numbers = numbers.collect::<Result<Vec<_>, _>>()?;
        let select = |tensor: &Tensor| {
            let numbers = Tensor::new(numbers.as_slice(), tensor.device())?;
            tensor.index_select(&numbers, 0)?.to_device(device)
        };
        Ok(self.tensors.iter().map(select).collect::<candle_core::Result<_>>()?)
    }
}
