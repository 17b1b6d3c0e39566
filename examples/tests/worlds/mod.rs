//! Worlds whose ranks are threads; a part of more than one test program.

use std::sync::Arc;
use std::time::Duration;

use sconce_collectives::{Communicator, Options, shm, single};

/// Runs `rank` on every rank of a world; returns the results in rank order.
pub(crate) fn on_ranks<R: Send>(world: usize, rank: impl Fn(Arc<dyn Communicator>) -> R + Sync) -> Vec<R> {
    if world == 1 {
        return vec![rank(single())];
    }
    let options = Options {
        timeout: Duration::from_secs(60),
        ..Options::default()
    };
    std::thread::scope(|scope| {
        let ranks = shm::threads(world, &options).unwrap().into_iter();
        let ranks: Vec<_> = ranks.map(|communicator| scope.spawn(|| rank(communicator))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
