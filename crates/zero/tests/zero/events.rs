//! Which operations a step runs, how many, and when: by the record of a communicator that watches them.

use super::parity::{SHARDED, gatherings};
use super::stack::Stack;
use super::watched::{Event, Operation, Watched, operations};
use super::{bits, engine, flat, on_ranks, sgd, values};
use sconce_collectives::{Communicator, Kind, Traffic};
use sconce_zero::{
    AdamW, BackwardPrefetch, DataParallel, Engine, EngineOptions, Gathering, ShardingStrategy, ZeroStage,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// FSDP's way to gather: one unit ahead, at times that the flags choose.
fn gathering(forward_prefetch: bool, backward_prefetch: BackwardPrefetch, reshard_after_forward: bool) -> Gathering {
    Gathering {
        prefetch_elements: usize::MAX,
        prefetch_units: 1,
        forward_prefetch,
        backward_prefetch,
        reshard_after_forward,
        ..Gathering::default()
    }
}

/// FULL_SHARD (true) and SHARD_GRAD_OP (false), with every choice of what is gathered ahead.
fn fsdp_gatherings() -> Vec<Gathering> {
    let mut all = Vec::new();
    for reshard in [true, false] {
        for forward in [true, false] {
            for backward in [BackwardPrefetch::Pre, BackwardPrefetch::Post, BackwardPrefetch::None] {
                all.push(gathering(forward, backward, reshard));
            }
        }
    }
    all
}

fn sharded(gathering: Gathering) -> EngineOptions {
    EngineOptions {
        gathering,
        ..of_strategy(|| Box::new(SHARDED))
    }
}

fn of_strategy(strategy: fn() -> Box<dyn ShardingStrategy>) -> EngineOptions {
    EngineOptions {
        strategy: strategy(),
        ..EngineOptions::default()
    }
}

/// What a rank comes to, in bits, and the operations that it ran.
#[derive(Debug, PartialEq)]
struct Run {
    losses: Vec<u32>,
    norms: Vec<u64>,
    parameters: Vec<u32>,
    operations: Vec<Operation>,
}

/// Trains on ranks that sleep at random if there is a seed.
fn train(world: usize, backwards: usize, seed: Option<u64>, options: &(dyn Fn() -> EngineOptions + Sync)) -> Vec<Run> {
    on_ranks(world, |communicator| {
        let watched = Watched::new(communicator);
        seed.into_iter().for_each(|seed| watched.sleep_at_random(seed));
        let engine = engine(&watched.communicator(), options());
        let stack = Stack::new(&engine, &watched, &[1, 2, 1, 2]);
        engine.set_optimizer(Box::new(AdamW::default())).unwrap();
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..4 {
            for micro in 1..=backwards {
                let loss = stack.loss(100 * step + 10 * micro + watched.rank());
                engine.backward(&loss, micro == backwards).unwrap();
                losses.extend(bits(&flat(&loss)));
            }
            norms.push(engine.clip_grad_norm(0.05).unwrap().to_bits());
            engine.step(0.01).unwrap();
            engine.zero_grad();
        }
        let parameters = bits(&values(&engine));
        let operations = operations(&watched.take_events());
        Run {
            losses,
            norms,
            parameters,
            operations,
        }
    })
}

#[test]
fn delays_of_any_rank_and_operation_change_no_bit_and_no_operation() {
    for (world, backwards) in [(2, 1), (3, 1), (2, 2)] {
        let check = |seed: u64, options: &(dyn Fn() -> EngineOptions + Sync)| {
            let options = &|| EngineOptions {
                first_bucket_bytes: 0,
                bucket_bytes: 500,
                ..options()
            };
            let expected = train(world, backwards, None, options);
            let found = train(world, backwards, Some(seed), options);
            assert_eq!(
                found,
                expected,
                "world {world}, {backwards} backwards, seed {seed}, {:?}",
                options()
            );
            for rank in &found[1..] {
                assert_eq!(rank.parameters, found[0].parameters);
                assert_eq!(rank.operations, found[0].operations);
            }
        };
        let strategies: [fn() -> Box<dyn ShardingStrategy>; 3] = [
            || Box::new(DataParallel),
            || Box::new(ZeroStage::One),
            || Box::new(ZeroStage::Two),
        ];
        for (seed, strategy) in strategies.into_iter().enumerate() {
            check(seed as u64, &|| of_strategy(strategy));
        }
        for (seed, gathering) in gatherings().into_iter().chain(fsdp_gatherings()).enumerate() {
            check(100 + seed as u64, &|| sharded(gathering.clone()));
        }
    }
}

/// Trains for some steps; returns of each the operations by kind, which the group's own counters confirm.
fn counts(
    communicator: Arc<dyn Communicator>,
    options: EngineOptions,
    matrices: &[usize],
    backwards: usize,
) -> Vec<BTreeMap<&'static str, usize>> {
    let watched = Watched::new(communicator);
    let engine = engine(&watched.communicator(), options);
    let stack = Stack::new(&engine, &watched, matrices);
    engine.set_optimizer(sgd()).unwrap();
    let mut by_step = Vec::new();
    for _ in 0..3 {
        watched.take_events();
        let before = watched.traffic();
        stack.step(&engine, backwards);
        let (operations, after) = (operations(&watched.take_events()), watched.traffic());
        let mut by_kind = BTreeMap::new();
        for operation in &operations {
            *by_kind.entry(operation.kind.name()).or_default() += 1;
        }
        for (kind, count) in &by_kind {
            let of_kind = |all: &[Traffic]| {
                let of_kind = all.iter().find(|traffic| traffic.kind.name() == *kind);
                of_kind.map_or((0, 0), |traffic| (traffic.calls, traffic.bytes))
            };
            let bytes = operations.iter().filter(|operation| operation.kind.name() == *kind);
            let (before, after) = (of_kind(&before), of_kind(&after));
            assert_eq!(after.0 - before.0, *count as u64, "{kind}");
            assert_eq!(
                after.1 - before.1,
                bytes.map(|operation| operation.bytes).sum::<u64>(),
                "{kind}"
            );
        }
        by_step.push(by_kind);
    }
    by_step
}

/// With U units, B gradient buckets and n backwards to a step, of which the last synchronises:
///
/// | strategy | reductions | gathers |
/// | --- | --- | --- |
/// | data parallelism | B all-reduces: gradients add up on each rank until the last backward | none |
/// | stage 1 | B reduce-scatters | B, of updated values |
/// | stage 2 | n B reduce-scatters: each backward's | B, of updated values |
/// | FULL_SHARD | n B reduce-scatters | n (2 U - 1): for each forward and backward, between which the last unit stays |
/// | SHARD_GRAD_OP | n B reduce-scatters | n U: for each forward |
///
/// In the first forward nobody knows yet which unit is the last: FULL_SHARD gathers it once more.
#[test]
fn a_step_runs_the_formulas_collectives_and_no_other() {
    // An embedding, three layers of two matrices, a head.
    const MATRICES: [usize; 5] = [1, 2, 2, 2, 1];
    const UNITS: usize = MATRICES.len();
    // Everything in one bucket; the head's gradient, which comes first, in one of its own; every gradient in one.
    let bucket_sizes = [(usize::MAX, usize::MAX, 1), (0, usize::MAX, 2), (0, 0, 8)];
    for world in [2, 3] {
        for (first, others, buckets) in bucket_sizes {
            for backwards in [1, 3] {
                let check =
                    |options: &(dyn Fn() -> EngineOptions + Sync), expected: &[(&'static str, usize)], extra| {
                        let options = || EngineOptions {
                            first_bucket_bytes: first,
                            bucket_bytes: others,
                            ..options()
                        };
                        for steps in on_ranks(world, |group| counts(group, options(), &MATRICES, backwards)) {
                            let of_step = |extra: usize| {
                                let counts = expected.iter().map(|(kind, count)| match *kind {
                                    "all_gather_each" => (*kind, count + extra),
                                    _ => (*kind, *count),
                                });
                                BTreeMap::from_iter(counts)
                            };
                            // Rank 0 tells the buckets' order.
                            let mut first = of_step(extra);
                            first.insert("broadcast", 1);
                            let message = format!(
                                "world {world}, {buckets} buckets, {backwards} backwards, {:?}",
                                options()
                            );
                            assert_eq!(steps, [first, of_step(0), of_step(0)], "{message}");
                        }
                    };
                let scatters = ("reduce_scatter_in_place", backwards * buckets);
                check(
                    &|| of_strategy(|| Box::new(DataParallel)),
                    &[("all_reduce", buckets)],
                    0,
                );
                let updated = ("all_gather_in_place", buckets);
                let stage_1 = [("reduce_scatter_in_place", buckets), updated];
                check(&|| of_strategy(|| Box::new(ZeroStage::One)), &stage_1, 0);
                check(&|| of_strategy(|| Box::new(ZeroStage::Two)), &[scatters, updated], 0);
                for gathering in fsdp_gatherings() {
                    let options = || sharded(gathering.clone());
                    let (gathers, extra) = match gathering.reshard_after_forward {
                        true => (backwards * (2 * UNITS - 1), 1),
                        false => (backwards * UNITS, 0),
                    };
                    check(&options, &[scatters, ("all_gather_each", gathers)], extra);
                }
            }
        }
    }
}

/// Returns what a rank did, in order: a unit's gather is queued (g) or a bucket's reduction (r); a unit has computed
/// forwards (f), begins to compute backwards (b) or has done so (e; not unit 0, whose input has no gradient).
fn timeline(events: &[Event], labels: &[u32]) -> String {
    let of_job = |job: usize| {
        let entered = |event: &Event| match event {
            Event::Entered(Some(number), operation) if *number == job => Some(*operation),
            _ => None,
        };
        events.iter().find_map(entered).expect("every job has run")
    };
    let words = events.iter().filter_map(|event| match event {
        Event::Queued(job) => {
            let operation = of_job(*job);
            let unit = labels.iter().position(|label| operation.label == Some(*label));
            Some(unit.map_or_else(|| "r".to_owned(), |unit| format!("g{unit}")))
        }
        Event::Forward(unit) => Some(format!("f{unit}")),
        Event::BackwardBegins(unit) => Some(format!("b{unit}")),
        Event::BackwardEnds(unit) => Some(format!("e{unit}")),
        Event::Entered(..) | Event::Ended(..) => None,
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Three units of one matrix and one bucket each, of which nothing is known yet.
fn three_units(watched: &Arc<Watched>, options: EngineOptions) -> (Engine, Stack) {
    let options = EngineOptions {
        first_bucket_bytes: 0,
        bucket_bytes: 0,
        ..options
    };
    let engine = engine(&watched.communicator(), options);
    let stack = Stack::new(&engine, watched, &[1; 3]);
    engine.set_optimizer(sgd()).unwrap();
    watched.take_events();
    (engine, stack)
}

/// Returns the labels of the units' gathers, from the events of a step in which each is gathered when it runs.
fn labels(events: &[Event]) -> Vec<u32> {
    let mut labels = Vec::new();
    for label in operations(events).iter().filter_map(|operation| operation.label) {
        if !labels.contains(&label) {
            labels.push(label);
        }
    }
    assert_eq!(labels.len(), 3, "a label for each unit");
    labels
}

#[test]
fn gathers_are_started_when_the_prefetch_mode_says() {
    use BackwardPrefetch::{None, Post, Pre};
    let cases = [
        // Before the unit at hand computes: in the last forward that of the backward after next.
        (true, Pre, true, "g0 g1 f0 g2 f1 g1 f2 b2 r e2 g0 b1 r e1 b0 r"),
        (false, Pre, true, "g0 f0 g1 f1 g2 g1 f2 b2 r e2 g0 b1 r e1 b0 r"),
        // When its gradients are on their way.
        (true, Post, true, "g0 g1 f0 g2 f1 f2 b2 r g1 e2 b1 r g0 e1 b0 r"),
        (false, Post, true, "g0 f0 g1 f1 g2 f2 b2 r g1 e2 b1 r g0 e1 b0 r"),
        // When the next one runs.
        (true, None, true, "g0 g1 f0 g2 f1 f2 b2 r e2 g1 b1 r e1 g0 b0 r"),
        (false, None, true, "g0 f0 g1 f1 g2 f2 b2 r e2 g1 b1 r e1 g0 b0 r"),
        // SHARD_GRAD_OP has nothing to gather for the backward.
        (true, Pre, false, "g0 g1 f0 g2 f1 f2 b2 r e2 b1 r e1 b0 r"),
        (false, Post, false, "g0 f0 g1 f1 g2 f2 b2 r e2 b1 r e1 b0 r"),
        (false, None, false, "g0 f0 g1 f1 g2 f2 b2 r e2 b1 r e1 b0 r"),
    ];
    for world in [1, 2, 3] {
        for (forward, backward, reshard, expected) in cases {
            on_ranks(world, |communicator| {
                let watched = Watched::new(communicator);
                let gathering = gathering(forward, backward, reshard);
                let (engine, stack) = three_units(&watched, sharded(gathering));
                stack.step(&engine, 1);
                let events = watched.take_events();
                let labels = labels(&events);
                let unknown = match reshard {
                    true => "g0 f0 g1 f1 g2 f2 g2 b2 r e2 g1 b1 r e1 g0 b0 r",
                    false => "g0 f0 g1 f1 g2 f2 b2 r e2 b1 r e1 b0 r",
                };
                assert_eq!(timeline(&events, &labels), unknown, "the order is not known yet");
                for _ in 0..2 {
                    stack.step(&engine, 1);
                    let events = watched.take_events();
                    let message = format!("world {world}, {forward} {backward:?} {reshard}");
                    assert_eq!(timeline(&events, &labels), expected, "{message}");
                }
            });
        }
    }
}

/// Checks that the n-th operation of a kind in a step is queued before, and ends after, the n-th event of a list: it is
/// held back until that event has come, and the step comes to its end all the same.
fn assert_in_flight(options: impl Fn() -> EngineOptions + Sync, kind: Kind, during: &'static [Option<Event>]) {
    for world in [2, 3] {
        on_ranks(world, |communicator| {
            let watched = Watched::new(communicator);
            let (engine, stack) = three_units(&watched, options());
            stack.step(&engine, 1);
            watched.take_events();
            let is_of_kind = move |operation: &Operation| operation.kind == kind;
            watched.hold_back(move |operation, events| {
                let number = operations(events)
                    .iter()
                    .copied()
                    .filter(|other| is_of_kind(other))
                    .count();
                let awaited = during.get(number).copied().flatten();
                is_of_kind(operation) && awaited.is_some_and(|event| !events.contains(&event))
            });
            stack.train(&engine, true);
            let events = watched.take_events();
            let place = |event: Event| events.iter().position(|other| *other == event).unwrap();
            let jobs: Vec<_> = events
                .iter()
                .filter_map(|event| match event {
                    Event::Ended(Some(job), operation) if is_of_kind(operation) => Some((*job, *event)),
                    _ => None,
                })
                .collect();
            assert_eq!(jobs.len(), during.len(), "{events:?}");
            for ((job, ended), event) in jobs.into_iter().zip(during) {
                if let Some(event) = event {
                    let places = [Event::Queued(job), *event, ended].map(place);
                    assert!(places.is_sorted(), "world {world}: {event:?} in {events:?}");
                }
            }
        });
    }
}

#[test]
fn a_gather_is_in_flight_while_the_unit_before_computes() {
    // By timeline: units 0, 1, 2 of the forward, then 1 and 0 of the backward.
    const DURING: [Option<Event>; 5] = [
        None,
        Some(Event::Forward(0)),
        Some(Event::Forward(1)),
        Some(Event::Forward(2)),
        Some(Event::BackwardEnds(1)),
    ];
    let options = || sharded(gathering(true, BackwardPrefetch::Pre, true));
    assert_in_flight(options, Kind::AllGatherEach, &DURING);
}

#[test]
fn a_reduction_is_in_flight_while_the_next_unit_computes_its_gradients() {
    const DURING: [Option<Event>; 3] = [Some(Event::BackwardEnds(1)), Some(Event::BackwardBegins(0)), None];
    assert_in_flight(|| of_strategy(|| Box::new(DataParallel)), Kind::AllReduce, &DURING);
    let scatter = Kind::ReduceScatterInPlace;
    assert_in_flight(|| of_strategy(|| Box::new(ZeroStage::One)), scatter, &DURING);
    assert_in_flight(|| of_strategy(|| Box::new(ZeroStage::Two)), scatter, &DURING);
    let options = || sharded(gathering(true, BackwardPrefetch::Pre, true));
    assert_in_flight(options, scatter, &DURING);
}
