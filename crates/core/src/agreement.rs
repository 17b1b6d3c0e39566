//! What all ranks must have decided alike, compared once before training: ranks that differ would train on with wrong numbers.

use crate::{Error, Result};
use sconce_collectives::Communicator;

/// Fails on every rank unless all of them describe `what` alike.
pub(crate) fn check_alike(communicator: &dyn Communicator, what: &'static str, own: &str) -> Result<()> {
    // An address says nothing, and is another in every process.
    let own = if own.contains("0x") { "" } else { own };
    let all = crate::objects::gather_objects(communicator, &[own.to_owned()])?;
    match all.iter().position(|other| *other != all[0]) {
        None => Ok(()),
        Some(rank) => Err(Error::Disagreement {
            what,
            first: all[0].clone(),
            rank,
            other: all[rank].clone(),
        }),
    }
}
