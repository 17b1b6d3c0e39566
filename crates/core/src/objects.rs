//! Values of ranks as JSON: what is small, and no tensor.

use crate::{Error, Result};
use sconce_collectives::Communicator;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Returns all ranks' values in rank order.
pub(crate) fn gather_objects<T: Serialize + DeserializeOwned>(
    communicator: &dyn Communicator,
    values: &[T],
) -> Result<Vec<T>> {
    gather(communicator, values, None)
}

/// Returns all ranks' values in rank order on rank 0, and nothing on the others.
pub(crate) fn gather_objects_on_main<T: Serialize + DeserializeOwned>(
    communicator: &dyn Communicator,
    values: &[T],
) -> Result<Vec<T>> {
    gather(communicator, values, Some(0))
}

fn gather<T: Serialize + DeserializeOwned>(
    communicator: &dyn Communicator,
    values: &[T],
    root: Option<usize>,
) -> Result<Vec<T>> {
    let own = crate::together::together(communicator, serde_json::to_vec(values))?;
    let mut lengths = vec![0i64; communicator.size()];
    communicator.all_gather(&[own.len() as i64], &mut lengths)?;
    let lengths: Vec<usize> = lengths.into_iter().map(|length| length as usize).collect();
    let gets_all = root.is_none_or(|root| root == communicator.rank());
    let mut all = vec![0u8; if gets_all { lengths.iter().sum() } else { 0 }];
    match root {
        None => communicator.all_gather_v(&own, &mut all, &lengths)?,
        Some(root) => communicator.gather_v(&own, gets_all.then_some(&mut all[..]), &lengths, root)?,
    }
    if !gets_all {
        return Ok(Vec::new());
    }
    let mut rest = all.as_slice();
    let mut gathered = Vec::new();
    for (rank, length) in lengths.into_iter().enumerate() {
        let (text, behind) = rest.split_at(length);
        rest = behind;
        let values: Vec<T> = serde_json::from_slice(text).map_err(|error| Error::Metrics {
            reason: format!("rank {rank}'s values cannot be read from JSON as they were written: {error}"),
        })?;
        gathered.extend(values);
    }
    Ok(gathered)
}
