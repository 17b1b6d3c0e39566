//! The contract of a communicator, run over every backend that this machine has.
//!
//! Each rule is a function of one rank; [`on_every_backend`] runs it on worlds of 1, 2, 3 and 4 ranks.

mod agreement;
mod behind;
mod failures;
mod groups;
mod moving;
mod point_to_point;
mod reducing;

use sconce_collectives::{Communicator, Options, shm, single};
use std::sync::Arc;
use std::time::Duration;

/// Runs `rule` on every rank of worlds 1 to 4 of every backend.
fn on_every_backend(rule: impl Fn(&dyn Communicator) + Sync) {
    rule(&*single());
    for size in 2..=4 {
        on_ranks(size, &rule);
    }
}

/// Runs `rule` on every rank of a shared-memory world of `size` threads.
fn on_ranks(size: usize, rule: impl Fn(&dyn Communicator) + Sync) {
    let ranks = threads(size, Duration::from_secs(60));
    std::thread::scope(|scope| {
        for communicator in ranks {
            let rule = &rule;
            scope.spawn(move || rule(&*communicator));
        }
    });
}

fn threads(size: usize, timeout: Duration) -> Vec<Arc<dyn Communicator>> {
    shm::threads(
        size,
        &Options {
            timeout,
            ..Options::default()
        },
    )
    .expect("threads can be made")
}

/// Sizes around every boundary: empty, odd, cache lines, small slots, stage slots, several pieces.
const SIZES: [usize; 12] = [0, 1, 3, 15, 17, 64, 1021, 2048, 2049, 65_537, 131_072, 400_003];

/// A value that depends on rank and index and is exact in every element type.
fn value(rank: usize, index: usize) -> usize {
    (index * 7 + rank * 5 + index * rank) % 11
}
