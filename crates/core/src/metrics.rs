//! Gathering results of an evaluation, so that every sample of the data set counts once.

use crate::data::BatchFacts;
use crate::objects::gather_objects;
use crate::{Error, Nested, Result};
use sconce_collectives::Communicator;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Gathers tensors, each trimmed to the rows that belong to new samples.
pub(crate) fn gather<N: Nested>(communicator: &dyn Communicator, batch: Option<BatchFacts>, tensors: &N) -> Result<N> {
    tensors.map_tensors(|tensor| {
        let rows = tensor.dims().first().copied();
        let own = match fresh_rows(communicator, batch, rows)? {
            Some(fresh) => tensor.narrow(0, 0, fresh)?,
            None => tensor.clone(),
        };
        Ok(communicator.all_gather_rows(&own)?)
    })
}

/// Gathers values, one for each sample of the batch, trimmed in the same way.
pub(crate) fn gather_objects_of_batch<T: Serialize + DeserializeOwned>(
    communicator: &dyn Communicator,
    batch: Option<BatchFacts>,
    values: &[T],
) -> Result<Vec<T>> {
    let fresh = fresh_rows(communicator, batch, Some(values.len()))?;
    gather_objects(communicator, &values[..fresh.unwrap_or(values.len())])
}

/// Returns how many of this rank's rows count, `None` outside of a loop; all ranks fail if one of them must.
///
/// `rows` is `None` for a tensor without dimensions.
fn fresh_rows(
    communicator: &dyn Communicator,
    batch: Option<BatchFacts>,
    rows: Option<usize>,
) -> Result<Option<usize>> {
    if batch.is_some_and(|batch| !batch.complete) {
        // The same on all ranks that are here; the others are not.
        let reason = "some ranks have no batch in this step, since even_batches is off; keep the results, and gather \
                      them after the loop";
        return Err(Error::Metrics { reason: reason.into() });
    }
    let number = |count: Option<usize>| count.map_or(-1, |count| count as i64);
    let own = [number(rows), number(batch.map(|batch| batch.rows))];
    let mut all = vec![0; own.len() * communicator.size()];
    communicator.all_gather(&own, &mut all)?;
    for (rank, [rows, expected]) in all.as_chunks::<2>().0.iter().enumerate() {
        let reason = match (*rows, *expected) {
            (-1, _) => {
                format!("rank {rank} gives a scalar; expected one row for each sample of the batch, or use gather")
            }
            (rows, expected) if expected != -1 && rows != expected => format!(
                "rank {rank} gives {rows} rows in a batch of {expected} samples; expected one row for each, or use gather"
            ),
            _ => continue,
        };
        return Err(Error::Metrics { reason });
    }
    Ok(batch.map(|batch| batch.fresh))
}
