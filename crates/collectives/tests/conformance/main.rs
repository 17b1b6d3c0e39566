//! The contract of a communicator, run over every backend that this machine has.
//!
//! Each rule is a function of one rank; [`on_every_backend`] runs it on worlds of 1, 2, 3 and 4 ranks. Ranks are threads
//! over shared memory; or processes, where [`over_mpi`] has started this program under `mpirun`, or [`over_nccl`] as ranks
//! with a GPU each.

mod agreement;
mod behind;
mod failures;
mod groups;
mod moving;
mod over_mpi;
mod over_nccl;
mod point_to_point;
mod reducing;

use sconce_collectives::{Communicator, Connection, Options, World, connect, shm, single};
use std::sync::{Arc, Barrier, OnceLock};
use std::time::Duration;

/// Runs `rule` on every rank of worlds 1 to 4 of every backend.
fn on_every_backend(rule: impl Fn(&dyn Communicator) + Sync) {
    rule(&*single());
    // NCCL also serves a group of one.
    for size in if over_nccl::is_rank() { 1 } else { 2 }..=4 {
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
    if is_rank_of_job() {
        return on_ranks_of_job(size, options, rule);
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

/// Says whether this process is a rank of a job that one of this program's tests has started.
fn is_rank_of_job() -> bool {
    over_mpi::is_rank() || over_nccl::is_rank()
}

/// The same on the first `size` ranks of the job that this process is one of.
fn on_ranks_of_job(size: usize, options: &Options, rule: impl Fn(Arc<dyn Communicator>, &dyn Fn())) {
    let world = World::from_env().expect("the job sets the world");
    if size > world.size {
        println!("skipped on {size} ranks: the job has {}", world.size);
        return;
    }
    if world.size == 1 {
        return rule(over_nccl::alone(&world, options), &|| {});
    }
    let with_gpu = |options: &Options| Options {
        gpu: over_nccl::is_rank().then_some(0),
        ..options.clone()
    };
    // Made once: over NCCL it takes a second.
    static ALL: OnceLock<Connection> = OnceLock::new();
    let all = ALL.get_or_init(|| connect(&world, &with_gpu(&Options::default())).expect("all ranks come"));
    let color = (world.rank < size).then_some(0);
    let group_to_meet = match &all.store {
        Some(_) => None,
        None => all.communicator.split(color, 0).expect("all ranks are here"),
    };
    let meet = || match (&all.store, &group_to_meet) {
        (Some(store), _) => store.barrier("meeting", size, Duration::from_secs(60)),
        (None, Some(group)) => group.barrier(),
        (None, None) => Ok(()),
    };
    let own = connect(&world, &with_gpu(options)).expect("all ranks come");
    let group = own.communicator.split(color, 0).expect("all ranks are here");
    if let Some(group) = group {
        assert!(size == 1 || ["mpi", "nccl"].contains(&group.backend()));
        rule(group, &|| meet().expect("the ranks meet"));
    }
    all.communicator.barrier().expect("no rank has failed");
}

/// Sizes around every boundary: empty, odd, cache lines, small slots, stage slots, several pieces.
const SIZES: [usize; 12] = [0, 1, 3, 15, 17, 64, 1021, 2048, 2049, 65_537, 131_072, 400_003];

/// A value that depends on rank and index and is exact in every element type.
fn value(rank: usize, index: usize) -> usize {
    (index * 7 + rank * 5 + index * rank) % 11
}
