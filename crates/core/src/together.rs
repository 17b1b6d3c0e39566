//! Failing together: what one rank cannot do, no rank goes on without.

use crate::{Error, Result};
use sconce_collectives::Communicator;

/// Does what is one rank's to do for all: returns what `work` does on rank 0, there, and fails on all ranks if it fails.
pub(crate) fn on_main<T, E: std::fmt::Display>(
    communicator: &dyn Communicator,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<Option<T>> {
    where_chosen(communicator, communicator.rank() == 0, work)
}

/// Does so where this rank `is_chosen`, which may be several ranks: returns what `work` does there, and fails on all ranks if
/// it fails on one.
pub(crate) fn where_chosen<T, E: std::fmt::Display>(
    communicator: &dyn Communicator,
    is_chosen: bool,
    work: impl FnOnce() -> Result<T, E>,
) -> Result<Option<T>> {
    together(communicator, if is_chosen { work().map(Some) } else { Ok(None) })
}

/// Returns the value if every rank has one, else the first failing rank's message on rank 0.
pub(crate) fn together<T, E: std::fmt::Display>(communicator: &dyn Communicator, outcome: Result<T, E>) -> Result<T> {
    // `{:#}` lets errors with a chain, such as anyhow's, say all of it.
    let message = outcome.as_ref().err().map(|error| format!("{error:#}"));
    let mut lengths = vec![0i64; communicator.size()];
    communicator.all_gather(&[message.as_ref().map_or(-1, |text| text.len() as i64)], &mut lengths)?;
    let Some(rank) = lengths.iter().position(|length| *length >= 0) else {
        return outcome.map_err(|error| Error::Together {
            rank: communicator.rank(),
            message: error.to_string(),
        });
    };
    let mut text = message
        .filter(|_| communicator.rank() == rank)
        .unwrap_or_default()
        .into_bytes();
    text.resize(lengths[rank] as usize, 0);
    communicator.broadcast(&mut text, rank)?;
    if communicator.rank() != 0 {
        return Err(Error::ReportedByMain);
    }
    Err(Error::Together {
        rank,
        message: String::from_utf8_lossy(&text).into_owned(),
    })
}
