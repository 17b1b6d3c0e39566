//! Batches out of samples.

use super::{DataError, Dataset};
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;

/// A sample that can be put into a batch with others of its kind.
///
/// | samples | batch |
/// | --- | --- |
/// | tensors of one shape \[..\] | one tensor \[batch, ..\] |
/// | numbers | a tensor \[batch\] of their dtype; `bool` becomes `u8` |
/// | `Vec`s of numbers, of one length | a tensor \[batch, length\] |
/// | `Vec`s of tensors, as many each | a `Vec` of tensors \[batch, ..\] |
/// | `String`s | a `Vec` of them |
/// | tuples, and maps with the same keys | the same of batches |
///
/// Implement it for a struct of your own by collating its fields.
pub trait Collate: Sized {
    /// What a batch of such samples is.
    type Batch;

    /// Puts samples, at least one, into a batch on `device`.
    ///
    /// # Errors
    /// When they do not fit together; the error says which of them.
    fn collate(samples: Vec<Self>, device: &Device) -> Result<Self::Batch, DataError>;
}

/// Samples that do not fit into one batch.
#[derive(Debug, thiserror::Error)]
#[error(
    "sample {sample} of the batch {found}, sample 0 {expected}; pad or cut samples to one size, or collate them yourself"
)]
struct Ragged {
    sample: usize,
    found: String,
    expected: String,
}

/// Fails if something of the samples, which `words` describes, differs from that of the first.
fn check_alike<S, K: PartialEq>(
    samples: &[S],
    of: impl Fn(&S) -> K,
    words: impl Fn(&K) -> String,
) -> Result<(), DataError> {
    let Some((first, rest)) = samples.split_first() else {
        return Err("a batch of no samples".into());
    };
    let expected = of(first);
    for (at, sample) in rest.iter().enumerate() {
        let found = of(sample);
        if found != expected {
            return Err(Box::new(Ragged {
                sample: at + 1,
                found: words(&found),
                expected: words(&expected),
            }));
        }
    }
    Ok(())
}

impl Collate for Tensor {
    type Batch = Self;

    fn collate(samples: Vec<Self>, device: &Device) -> Result<Self, DataError> {
        let kind = |sample: &Self| (sample.dims().to_vec(), sample.dtype());
        check_alike(&samples, kind, |(shape, dtype)| {
            format!("is {} {shape:?}", dtype.as_str())
        })?;
        Ok(Self::stack(&samples, 0)?.to_device(device)?)
    }
}

impl Collate for Vec<Tensor> {
    type Batch = Self;

    fn collate(samples: Vec<Self>, device: &Device) -> Result<Self, DataError> {
        check_alike(&samples, Self::len, |count| format!("has {count} tensors"))?;
        let count = samples[0].len();
        let mut columns = vec![Self::with_capacity(samples.len()); count];
        for sample in samples {
            columns
                .iter_mut()
                .zip(sample)
                .for_each(|(column, tensor)| column.push(tensor));
        }
        let collate =
            |(at, column)| Tensor::collate(column, device).map_err(|error| format!("tensor {at}: {error}").into());
        columns.into_iter().enumerate().map(collate).collect()
    }
}

macro_rules! collate_numbers {
    ($($number:ty),*) => {$(
        impl Collate for $number {
            type Batch = Tensor;

            fn collate(samples: Vec<Self>, device: &Device) -> Result<Tensor, DataError> {
                let count = samples.len();
                Ok(Tensor::from_vec(samples, count, device)?)
            }
        }

        impl Collate for Vec<$number> {
            type Batch = Tensor;

            fn collate(samples: Vec<Self>, device: &Device) -> Result<Tensor, DataError> {
                check_alike(&samples, Vec::len, |length| format!("has length {length}"))?;
                let shape = (samples.len(), samples[0].len());
                Ok(Tensor::from_vec(samples.concat(), shape, device)?)
            }
        }
    )*};
}

collate_numbers!(u8, u32, i64, half::f16, half::bf16, f32, f64);

impl Collate for bool {
    type Batch = Tensor;

    fn collate(samples: Vec<Self>, device: &Device) -> Result<Tensor, DataError> {
        u8::collate(samples.into_iter().map(u8::from).collect(), device)
    }
}

impl Collate for String {
    type Batch = Vec<Self>;

    fn collate(samples: Vec<Self>, _: &Device) -> Result<Vec<Self>, DataError> {
        Ok(samples)
    }
}

impl<T: Collate> Collate for BTreeMap<String, T> {
    type Batch = BTreeMap<String, T::Batch>;

    fn collate(samples: Vec<Self>, device: &Device) -> Result<Self::Batch, DataError> {
        let keys = |sample: &Self| sample.keys().cloned().collect::<Vec<_>>();
        check_alike(&samples, keys, |keys| format!("has the keys {keys:?}"))?;
        let count = samples.len();
        let mut columns = BTreeMap::<String, Vec<T>>::new();
        for (key, value) in samples.into_iter().flatten() {
            columns
                .entry(key)
                .or_insert_with(|| Vec::with_capacity(count))
                .push(value);
        }
        let collate = |(key, column)| match T::collate(column, device) {
            Ok(batch) => Ok((key, batch)),
            Err(error) => Err(format!("key {key:?}: {error}").into()),
        };
        columns.into_iter().map(collate).collect()
    }
}

macro_rules! collate_tuples {
    ($(($($kind:ident $place:tt),+)),*) => {$(
        impl<$($kind: Collate),+> Collate for ($($kind,)+) {
            type Batch = ($($kind::Batch,)+);

            fn collate(samples: Vec<Self>, device: &Device) -> Result<Self::Batch, DataError> {
                let count = samples.len();
                let mut columns = ($(Vec::<$kind>::with_capacity(count),)+);
                for sample in samples {
                    $(columns.$place.push(sample.$place);)+
                }
                Ok(($(
                    $kind::collate(columns.$place, device)
                        .map_err(|error| format!("field {}: {error}", $place))?,
                )+))
            }
        }
    )*};
}

collate_tuples!((A 0, B 1), (A 0, B 1, C 2), (A 0, B 1, C 2, D 3), (A 0, B 1, C 2, D 3, E 4), (A 0, B 1, C 2, D 3, E 4, F 5));

/// Samples in memory are a data set, whose batches are collated.
impl<T: Collate<Batch: Send + 'static> + Clone + Send + Sync + 'static> Dataset for Vec<T> {
    type Batch = T::Batch;

    fn len(&self) -> usize {
        Self::len(self)
    }

    fn batch(&self, samples: &[usize], device: &Device) -> Result<T::Batch, DataError> {
        T::collate(samples.iter().map(|sample| self[*sample].clone()).collect(), device)
    }
}

/// Samples that are made one by one when they are needed, as by reading a file each.
///
/// ```
/// use sconce_core::data::{DataError, IndexedSamples};
///
/// /// Pairs of a number and its square.
/// let squares = IndexedSamples::new(100, |number| Ok::<_, DataError>((number as f32, (number * number) as f32)));
/// # let _ = squares;
/// ```
#[derive(Clone)]
pub struct IndexedSamples<F> {
    samples: usize,
    make: F,
}

impl<F> IndexedSamples<F> {
    /// Makes a data set of `samples` samples, of which `make` makes the one with a number.
    pub fn new<T: Collate>(samples: usize, make: F) -> Self
    where
        F: Fn(usize) -> Result<T, DataError> + Send + Sync + 'static,
    {
        Self { samples, make }
    }
}

impl<F> std::fmt::Debug for IndexedSamples<F> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("IndexedSamples")
            .field("samples", &self.samples)
            .finish_non_exhaustive()
    }
}

impl<F, T> Dataset for IndexedSamples<F>
where
    F: Fn(usize) -> Result<T, DataError> + Send + Sync + 'static,
    T: Collate<Batch: Send + 'static>,
{
    type Batch = T::Batch;

    fn len(&self) -> usize {
        self.samples
    }

    fn batch(&self, samples: &[usize], device: &Device) -> Result<T::Batch, DataError> {
        let make = |sample: &usize| (self.make)(*sample).map_err(|error| format!("sample {sample}: {error}").into());
        T::collate(samples.iter().map(make).collect::<Result<_, DataError>>()?, device)
    }
}
