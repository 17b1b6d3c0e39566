//! The contract of a communicator, run over every backend that this machine has.
//!
//! Each rule is a function of one rank; [`on_every_backend`] runs it on worlds of 1, 2, 3 and 4 ranks. Ranks are threads
//! over shared memory; or, where [`over_mpi`] has started this program under `mpirun`, processes over MPI.

mod agreement;
mod behind;
mod failures;
mod groups;
mod moving;
mod over_mpi;
mod point_to_point;
mod reducing;

use sconce_collectives::{Communicator, Options, World, connect, shm, single};
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// Runs `rule` on every rank of worlds 1 to 4 of every backend.
fn on_every_backend(rule: impl Fn(&dyn Communicator) + Sync) {
    rule(&*single());
    for size in 2..=4 {
        on_ranks(size, &rule);
    }
}

/// Runs `rule` on every rank of a world of `size` ranks.
fn on_ranks(size: usize, rule: impl Fn(&dyn Communicator) + Sync) {
    let options = Options {
        timeout: Duration::from_secs(60),
        ..Options::default()
    };
    on_ranks_with(size, &options, |group, _| rule(&*group));
}

/// Runs `rule` on every rank of a world of `size` ranks, with a function that returns when all of them have called it.
fn on_ranks_with(size: usize, options: &Options, rule: impl Fn(Arc<dyn Communicator>, &dyn Fn()) + Sync) {
    if over_mpi::is_rank() {
        return on_ranks_over_mpi(size, options, rule);
    }
    let ranks = shm::threads(size, options).expect("threads can be made");
    let all_here = Barrier::new(size);
    std::thread::scope(|scope| {
        for communicator in ranks {
            let (rule, all_here) = (&rule, &all_here);
            scope.spawn(move || {
                rule(communicator, &|| {
                    all_here.wait();
                });
            });
        }
    });
}

/// The same on the first `size` ranks of the job that this process is one of.
fn on_ranks_over_mpi(size: usize, options: &Options, rule: impl Fn(Arc<dyn Communicator>, &dyn Fn())) {
    let world = World::from_env().expect("mpirun sets the world");
    if size > world.size {
        println!("skipped on {size} ranks: the job has {}", world.size);
        return;
    }
    let all = connect(&world, &Options::default())
        .expect("all ranks come")
        .communicator;
    let color = (world.rank < size).then_some(0);
    let meeting = all.split(color, 0).expect("all ranks are here");
    let group = connect(&world, options).expect("all ranks come").communicator;
    let group = group.split(color, 0).expect("all ranks are here");
    if let (Some(group), Some(meeting)) = (group, meeting) {
        assert_eq!(group.backend(), "mpi");
        rule(group, &|| meeting.barrier().expect("the ranks meet"));
    }
    all.barrier().expect("no rank has failed");
}

/// Sizes around every boundary: empty, odd, cache lines, small slots, stage slots, several pieces.
const SIZES: [usize; 12] = [0, 1, 3, 15, 17, 64, 1021, 2048, 2049, 65_537, 131_072, 400_003];

/// A value that depends on rank and index and is exact in every element type.
fn value(rank: usize, index: usize) -> usize {
    (index * 7 + rank * 5 + index * rank) % 11
}
