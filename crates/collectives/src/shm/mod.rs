//! Shared memory: ranks on one host, as processes or as threads, by the same code.
//!
//! # Protocol
//!
//! All ranks map one *segment* (`layout`). Each rank has a line of words that only it writes:
//!
//! | word | written | meaning |
//! | --- | --- | --- |
//! | `epoch` | at every step | how many steps this rank has published; peers wait on it |
//! | `calls[n % 2]` | before the first step of collective `n` | signature and buffer location |
//! | `entered` | likewise | number of collectives entered |
//! | `presence` | on attaching and leaving | absent, present, left |
//!
//! A *step* is: write data, store `epoch + 1`, wake sleepers. To *synchronise* is to publish a step and wait until all
//! ranks have published as many. All ranks publish the same number of steps in every operation, so an epoch number
//! names the same moment of the same operation on every rank.
//!
//! Every collective begins by *entering*: announce the call, synchronise, compare all signatures. A rank that passed
//! the synchronisation of collective `n` knows that all ranks have finished collective `n - 1`: that is why two
//! announcements and two small slots per rank are enough, and why stage slots are free on entry.
//!
//! Waiting is spinning, then yielding, then sleeping (`waiting`). Sleepers look every 20 ms for a recorded failure, a
//! dead or departed peer and the deadline. The first failure is recorded in the segment (`failure`), and every rank
//! returns it from its current or next operation.
//!
//! Nothing here has a name in a file system: segments are anonymous memory files whose descriptors travel over Unix
//! sockets (`descriptors`), so a crash leaks nothing and a stale segment cannot be opened.

mod communicator;
mod connect;
mod descriptors;
mod failure;
mod group;
mod in_place;
mod layout;
mod liveness;
mod operations;
mod point_to_point;
mod private;
mod region;
mod segment;
mod small;
mod split;
mod staged;
mod waiting;

pub use connect::connect;

use crate::{Communicator, Error, Options, Result, single};
use communicator::communicator;
use descriptors::Links;
use group::Group;
use layout::Layout;
use segment::Segment;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Makes a group of `size` ranks for threads of this process; element r is rank r's communicator.
///
/// # Errors
/// When the system refuses memory, sockets or threads, or `size` is 0.
pub fn threads(size: usize, options: &Options) -> Result<Vec<Arc<dyn Communicator>>> {
    match size {
        0 => Err(Error::Argument {
            rank: 0,
            operation: "threads",
            reason: "a group has at least one rank".into(),
        }),
        1 => Ok(vec![single()]),
        _ => {
            let segment = Segment::create_file(&Layout { ranks: size })?;
            let links = Links::of_threads(size)?;
            // Attaching returns when all ranks have attached, so every rank needs a thread for it.
            std::thread::scope(|scope| {
                let attach = |(rank, links)| {
                    let file = segment.try_clone();
                    scope.spawn(move || attach("threads".into(), rank, size, file, links, options))
                };
                let ranks: Vec<_> = links.into_iter().enumerate().map(attach).collect();
                ranks
                    .into_iter()
                    .map(|rank| rank.join().expect("attaching does not panic"))
                    .collect()
            })
        }
    }
}

fn attach(
    name: String,
    rank: usize,
    size: usize,
    file: std::io::Result<OwnedFd>,
    links: Links,
    options: &Options,
) -> Result<Arc<dyn Communicator>> {
    let file = file.map_err(|source| Error::Io {
        context: "duplicating a descriptor".into(),
        source,
    })?;
    Ok(communicator(Group::attach(name, rank, size, file, links, options)?))
}
