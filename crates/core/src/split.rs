//! Dividing work that every rank has in full: each takes its own contiguous part.

use crate::{Error, Result};
use candle_core::Tensor;
use std::collections::BTreeMap;
use std::ops::Range;

/// Inputs that can be divided among ranks: vectors, tensors (along dimension 0), and tuples and maps of such, which have
/// one number of elements each.
pub trait Split: Sized {
    /// Returns the number of elements.
    ///
    /// # Errors
    /// When parts have different numbers.
    fn count(&self) -> Result<usize>;

    /// Returns elements `range`, then the last element of the whole `repeats` times.
    ///
    /// # Errors
    /// Failures of candle.
    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self>;
}

impl<T: Clone> Split for Vec<T> {
    fn count(&self) -> Result<usize> {
        Ok(self.len())
    }

    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self> {
        let mut part = self[range].to_vec();
        part.extend(std::iter::repeat_n(self.last().cloned(), repeats).flatten());
        Ok(part)
    }
}

impl Split for Tensor {
    fn count(&self) -> Result<usize> {
        Ok(self.dim(0)?)
    }

    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self> {
        let part = self.narrow(0, range.start, range.len())?;
        if repeats == 0 {
            return Ok(part);
        }
        let last = self.narrow(0, self.dim(0)? - 1, 1)?;
        let parts = Vec::from_iter(std::iter::once(part).chain(std::iter::repeat_n(last, repeats)));
        Ok(Self::cat(&parts, 0)?)
    }
}

impl<A: Split, B: Split> Split for (A, B) {
    fn count(&self) -> Result<usize> {
        same([("0".into(), self.0.count()?), ("1".into(), self.1.count()?)])
    }

    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self> {
        Ok((self.0.part(range.clone(), repeats)?, self.1.part(range, repeats)?))
    }
}

impl<K: Ord + Clone + std::fmt::Display, V: Split> Split for BTreeMap<K, V> {
    fn count(&self) -> Result<usize> {
        let counts = self.iter().map(|(key, value)| Ok((key.to_string(), value.count()?)));
        same(counts.collect::<Result<Vec<_>>>()?)
    }

    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self> {
        let parts = self.iter();
        parts
            .map(|(key, value)| Ok((key.clone(), value.part(range.clone(), repeats)?)))
            .collect()
    }
}

/// Returns the one number that all parts have; 0 where there are no parts.
fn same(counts: impl IntoIterator<Item = (String, usize)>) -> Result<usize> {
    let mut counts = counts.into_iter();
    let Some((first, count)) = counts.next() else {
        return Ok(0);
    };
    match counts.find(|(_, other)| *other != count) {
        None => Ok(count),
        Some((name, other)) => Err(Error::Setting {
            setting: "split_between_processes inputs",
            value: format!("{name}: {other} elements"),
            expected: format!("{count} elements, as in {first}; all parts are divided alike"),
        }),
    }
}

/// Returns a rank's part of `inputs`; with `pad`, all ranks get as many elements as the first.
pub(crate) fn split<S: Split>(inputs: &S, pad: bool, rank: usize, world: usize) -> Result<S> {
    let count = inputs.count()?;
    let (each, more) = (count / world, count % world);
    let start = |rank: usize| rank * each + rank.min(more);
    let range = start(rank)..start(rank + 1);
    let most = each + usize::from(more > 0);
    let repeats = if pad { most - range.len() } else { 0 };
    inputs.part(range, repeats)
}
