//! What a rank holds under FSDP's strategies: its shares, and of gathered units no more than prefetching asks for.

use super::parity::SHARDED;
use super::stack::{MATRIX, Stack};
use super::watched::Watched;
use super::{buckets, engine, on_ranks};
use sconce_zero::{AdamW, BackwardPrefetch, DataParallel, EngineOptions, Gathering, MemoryReport, ShardingStrategy};

/// Units of two matrices each.
const UNITS: usize = 6;
const UNIT: u64 = 2 * MATRIX;
const MODEL: u64 = UNITS as u64 * UNIT;

/// Returns what each rank of a world holds after some steps.
fn memory(
    world: usize,
    strategy: fn() -> Box<dyn ShardingStrategy>,
    gathering: &Gathering,
    backwards: usize,
) -> Vec<MemoryReport> {
    on_ranks(world, |communicator| {
        let watched = Watched::new(communicator);
        let options = EngineOptions {
            strategy: strategy(),
            gathering: gathering.clone(),
            ..buckets(0, 0)
        };
        let engine = engine(&watched.communicator(), options);
        let stack = Stack::new(&engine, &watched, &[2; UNITS]);
        engine.set_optimizer(Box::new(AdamW::default())).unwrap();
        (0..3).for_each(|_| stack.step(&engine, backwards));
        engine.memory()
    })
}

#[test]
fn full_shard_holds_shares_and_gathers_the_unit_at_hand_and_those_ahead() {
    for world in [1, 2, 4] {
        for ahead in 0..=3 {
            for (forward_prefetch, backward_prefetch) in [
                (true, BackwardPrefetch::Pre),
                (false, BackwardPrefetch::Pre),
                (true, BackwardPrefetch::None),
                (false, BackwardPrefetch::Post),
                (false, BackwardPrefetch::None),
            ] {
                let gathering = Gathering {
                    prefetch_units: ahead,
                    prefetch_elements: usize::MAX,
                    forward_prefetch,
                    backward_prefetch,
                    ..Gathering::default()
                };
                let peak = match (forward_prefetch, backward_prefetch) {
                    (true, _) | (_, BackwardPrefetch::Pre) => 1 + ahead,
                    // The unit at hand has gone when those ahead come.
                    (false, BackwardPrefetch::Post) => ahead.max(1),
                    (false, BackwardPrefetch::None) => 1,
                };
                for found in memory(world, || Box::new(SHARDED), &gathering, 1) {
                    assert_eq!(found.gathered_peak, peak as u64 * UNIT, "world {world}, {gathering:?}");
                    assert_eq!(shares(&found), [MODEL / world as u64; 3], "world {world}");
                    assert_eq!(found.gathered, 0);
                    assert!(
                        (UNIT..=(peak as u64 + 1) * UNIT).contains(&found.spare),
                        "{}",
                        found.spare
                    );
                }
            }
        }
    }
}

#[test]
fn shard_grad_op_holds_shares_and_gathers_the_whole_model_between_forward_and_backward() {
    for world in [1, 2, 4] {
        for (prefetch_units, backwards) in [(0, 1), (1, 1), (1, 2)] {
            let gathering = Gathering {
                prefetch_units,
                reshard_after_forward: false,
                ..Gathering::default()
            };
            for found in memory(world, || Box::new(SHARDED), &gathering, backwards) {
                assert_eq!(found.gathered_peak, MODEL, "world {world}, {gathering:?}");
                assert_eq!(shares(&found), [MODEL / world as u64; 3], "world {world}");
                assert_eq!(found.gathered, 0);
            }
        }
    }
}

#[test]
fn no_shard_holds_everything_and_gathers_nothing() {
    for world in [1, 2, 4] {
        for found in memory(world, || Box::new(DataParallel), &Gathering::default(), 1) {
            assert_eq!(shares(&found), [MODEL; 3], "world {world}");
            assert_eq!((found.gathered_peak, found.spare, found.buffers), (0, 0, 0));
        }
    }
}

/// Parameters, gradients, and each of AdamW's two moments; there is nothing on disk and no master beside them.
fn shares(memory: &MemoryReport) -> [u64; 3] {
    assert_eq!((memory.masters, memory.on_disk), (0, 0));
    [memory.parameters, memory.gradients, memory.optimizer_state / 2]
}
