//! The groups of ranks among which state is sharded and over which it is repeated.
//!
//! Without groups all ranks shard together. With groups of `n`, ranks `0..n` hold one whole model together, ranks `n..2n`
//! the same model once more, and so on: as rows and columns of a grid.
//!
//! ```text
//!              shard group
//! replicas   |  0  1  2  |
//!            |  3  4  5  |
//! ```

use crate::{Error, Result};
use sconce_collectives::{Communicator, Traffic};
use std::sync::Arc;

/// This rank's groups.
#[derive(Debug)]
pub(crate) struct Mesh {
    /// All ranks.
    pub(crate) world: Arc<dyn Communicator>,
    /// The ranks that hold one whole model together.
    pub(crate) shard: Arc<dyn Communicator>,
    /// The ranks of other groups that hold the same shares, if there are other groups.
    pub(crate) replicas: Option<Arc<dyn Communicator>>,
}

impl Mesh {
    /// Makes groups of `shard_group` ranks; called by all ranks of `world`.
    pub(crate) fn new(world: Arc<dyn Communicator>, shard_group: Option<usize>) -> Result<Self> {
        let (rank, size) = (world.rank(), world.size());
        let Some(ranks) = shard_group.filter(|ranks| *ranks != size) else {
            let shard = Arc::clone(&world);
            let replicas = None;
            return Ok(Self { world, shard, replicas });
        };
        if ranks == 0 || !size.is_multiple_of(ranks) {
            return Err(Error::Setting {
                setting: "shard_group",
                value: ranks.to_string(),
                expected: "a divisor of the number of ranks",
            });
        }
        let group_of = |color: usize| {
            let group = world.split(Some(color as u32), rank as i64)?;
            group.ok_or(Error::Order {
                what: "a communicator that leaves its ranks out of groups they ask for",
                hint: "return a group from Communicator::split for every color",
            })
        };
        let shard = group_of(rank / ranks)?;
        let replicas = Some(group_of(rank % ranks)?);
        Ok(Self { world, shard, replicas })
    }

    /// Returns this rank's number among those that share one model, and how many they are.
    pub(crate) fn place(&self) -> (usize, usize) {
        (self.shard.rank(), self.shard.size())
    }

    /// Ends all groups.
    pub(crate) fn abort(&self, reason: &str) {
        self.groups().for_each(|group| group.abort(reason));
    }

    /// Returns what this rank has moved in all groups, by kind of operation.
    pub(crate) fn traffic(&self) -> Vec<Traffic> {
        let mut sums: Vec<Traffic> = Vec::new();
        for traffic in self.groups().flat_map(|group| group.traffic()) {
            match sums.iter_mut().find(|sum| sum.kind == traffic.kind) {
                None => sums.push(traffic),
                Some(sum) => {
                    sum.calls += traffic.calls;
                    sum.elements += traffic.elements;
                    sum.bytes += traffic.bytes;
                }
            }
        }
        sums
    }

    fn groups(&self) -> impl Iterator<Item = &Arc<dyn Communicator>> {
        let apart = self.replicas.iter().flat_map(|replicas| [&self.shard, replicas]);
        std::iter::once(&self.world).chain(apart)
    }
}
