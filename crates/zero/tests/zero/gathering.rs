//! What is gathered when: how far ahead, how much at once, how much altogether.

use super::parity::{SHARDED, builder, mean_square, weight};
use super::{engine, on_ranks, sgd};
use candle_core::{DType, Device, Tensor};
use sconce_collectives::{Communicator, Kind, Traffic};
use sconce_zero::{DataParallel, Engine, EngineOptions, Gathering, ShardingStrategy, Unit, ZeroStage, unit};
use std::cell::RefCell;
use std::sync::Arc;

const UNITS: usize = 5;
/// Elements of each unit, and their bytes.
const ELEMENTS: usize = 64;
const BYTES: u64 = 4 * ELEMENTS as u64;

/// Equal units, one after the other.
struct Chain {
    units: Vec<Unit<Tensor>>,
    /// What was gathered during each unit's last forward, in units.
    seen: RefCell<Vec<u64>>,
}

impl Chain {
    fn new(engine: &Engine) -> Self {
        let vb = builder(engine);
        let matrix = |number: usize| unit(vb.clone(), &number.to_string(), |vb| weight(&vb, (8, 8), "weight")).unwrap();
        let units = (0..UNITS).map(matrix).collect();
        engine.set_optimizer(sgd()).unwrap();
        Self {
            units,
            seen: RefCell::default(),
        }
    }

    /// Runs the units in an order, forwards and backwards.
    fn train(&self, engine: &Engine, order: impl Iterator<Item = usize>, synchronise: bool) {
        self.seen.borrow_mut().clear();
        let mut hidden = Tensor::ones((3, 8), DType::F32, &Device::Cpu).unwrap();
        for number in order {
            let output = self.units[number].run_once(hidden, |weight, hidden| {
                self.seen.borrow_mut().push(engine.memory().gathered / BYTES);
                hidden.matmul(weight)?.tanh()
            });
            hidden = output.unwrap();
        }
        engine.backward(&mean_square(&hidden).unwrap(), synchronise).unwrap();
        assert_eq!(engine.memory().gathered, 0);
    }

    fn step(&self, engine: &Engine) {
        self.train(engine, 0..UNITS, true);
        engine.step(0.1).unwrap();
        engine.zero_grad();
        assert_eq!(engine.memory().gathered, 0);
    }
}

fn options(prefetch_units: usize, live_units: usize) -> EngineOptions {
    EngineOptions {
        strategy: Box::new(SHARDED),
        gathering: Gathering {
            prefetch_elements: prefetch_units * ELEMENTS,
            max_live_elements: live_units * ELEMENTS,
            ..Gathering::default()
        },
        ..EngineOptions::default()
    }
}

#[test]
fn gathers_run_ahead_within_both_limits_once_the_order_is_known() {
    // Units ahead, units at once, and what is then gathered while each unit computes. In the last one the first units of
    // the backward are ahead.
    let cases = [
        (0, 100, [1, 1, 1, 1, 1]),
        (1, 100, [2, 2, 2, 2, 2]),
        (2, 100, [3, 3, 3, 3, 3]),
        (100, 100, [5, 5, 5, 5, 5]),
        (100, 3, [3, 3, 3, 3, 3]),
        (100, 1, [1, 1, 1, 1, 1]),
        // No room at all: the unit at hand is gathered all the same.
        (100, 0, [1, 1, 1, 1, 1]),
    ];
    for world in 1..=3 {
        for (ahead, live, expected) in cases {
            let peaks = on_ranks(world, |communicator| {
                let engine = engine(&communicator, options(ahead, live));
                let chain = Chain::new(&engine);
                assert_eq!(engine.memory().gathered_peak, 0);
                chain.step(&engine);
                assert_eq!(*chain.seen.borrow(), [1; UNITS], "the order is not known yet");
                assert_eq!(engine.memory().gathered_peak, BYTES);
                for _ in 0..2 {
                    chain.step(&engine);
                    assert_eq!(*chain.seen.borrow(), expected, "{ahead} ahead, {live} live");
                }
                engine.memory().gathered_peak
            });
            let peak = BYTES * expected.into_iter().max().unwrap_or(0);
            assert_eq!(peaks, vec![peak; world], "{ahead} ahead, {live} live");
        }
    }
}

#[test]
fn another_order_ends_the_running_ahead_until_it_is_known_in_its_turn() {
    on_ranks(2, |communicator| {
        let engine = engine(&communicator, options(1, 100));
        let chain = Chain::new(&engine);
        let run = |order: [usize; UNITS], expected: [u64; UNITS]| {
            chain.train(&engine, order.into_iter(), true);
            assert_eq!(*chain.seen.borrow(), expected);
        };
        let (forwards, turned) = ([0, 1, 2, 3, 4], [0, 1, 4, 3, 2]);
        run(forwards, [1; UNITS]);
        run(forwards, [2; UNITS]);
        // While unit 1 computes unit 2 is ahead, which does not come.
        run(turned, [2, 2, 1, 1, 1]);
        run(turned, [1; UNITS]);
        run(turned, [2; UNITS]);
        run(turned, [2; UNITS]);
    });
}

fn volume(communicator: &Arc<dyn Communicator>) -> u64 {
    communicator.traffic().iter().map(Traffic::volume).sum()
}

fn gathers(communicator: &Arc<dyn Communicator>) -> u64 {
    let traffic = communicator.traffic();
    let gathers = traffic.iter().filter(|traffic| traffic.kind == Kind::AllGatherEach);
    gathers.map(|traffic| traffic.calls).sum()
}

#[test]
fn a_step_moves_three_elements_per_parameter_and_micro_batch_but_for_the_unit_at_the_turn() {
    for world in 2..=4 {
        // What a unit takes with its chunks rounded up to whole cache lines.
        let padded = (world * ELEMENTS.div_ceil(world).next_multiple_of(16)) as u64;
        let model = UNITS as u64 * padded;
        for (ahead, live) in [(0, 100), (1, 100), (100, 100), (100, 2)] {
            on_ranks(world, |communicator| {
                let engine = engine(&communicator, options(ahead, live));
                let chain = Chain::new(&engine);
                let moved = |work: &dyn Fn()| {
                    let before = (volume(&communicator), gathers(&communicator));
                    work();
                    (volume(&communicator) - before.0, gathers(&communicator) - before.1)
                };
                // The first time nobody knows that the last unit is the first of the backward; buckets are laid out too.
                assert_eq!(moved(&|| chain.step(&engine)).1, 2 * UNITS as u64);
                assert_eq!(
                    moved(&|| chain.step(&engine)),
                    (3 * model - padded, 2 * UNITS as u64 - 1)
                );
                let accumulate = || {
                    chain.train(&engine, 0..UNITS, false);
                    chain.train(&engine, 0..UNITS, false);
                    chain.step(&engine);
                };
                assert_eq!(
                    moved(&accumulate),
                    (3 * (3 * model - padded), 3 * (2 * UNITS as u64 - 1))
                );
            });
        }
    }
}

#[test]
fn lower_stages_move_two_elements_per_parameter_and_gather_nothing() {
    let strategies: [fn() -> Box<dyn ShardingStrategy>; 3] = [
        || Box::new(DataParallel),
        || Box::new(ZeroStage::One),
        || Box::new(ZeroStage::Two),
    ];
    for world in 2..=4 {
        let padded = (world * ELEMENTS.div_ceil(world).next_multiple_of(16)) as u64;
        for strategy in strategies {
            on_ranks(world, |communicator| {
                let strategy = strategy();
                let engine = engine(
                    &communicator,
                    EngineOptions {
                        strategy,
                        ..EngineOptions::default()
                    },
                );
                let chain = Chain::new(&engine);
                chain.step(&engine);
                let before = volume(&communicator);
                chain.step(&engine);
                assert_eq!(volume(&communicator) - before, 2 * UNITS as u64 * padded);
                assert_eq!(gathers(&communicator), 0);
                assert_eq!(engine.memory().gathered_peak, 0);
            });
        }
    }
}

#[test]
fn frozen_units_are_gathered_for_a_backward_only_above_trained_ones() {
    on_ranks(2, |communicator| {
        let options = EngineOptions {
            frozen: sconce_zero::ParameterSet::matching(|parameter| !parameter.name.starts_with('2')),
            ..options(0, 100)
        };
        let engine = engine(&communicator, options);
        let chain = Chain::new(&engine);
        chain.step(&engine);
        let before = gathers(&communicator);
        chain.step(&engine);
        // Forwards of all, backwards of the last, which stays from its forward, and of units 3 and 2.
        assert_eq!(gathers(&communicator) - before, UNITS as u64 + 2);
    });
}

#[test]
fn a_unit_that_waits_for_a_gradient_that_never_comes_goes_at_the_end_of_the_backward() {
    on_ranks(2, |communicator| {
        let options = EngineOptions {
            find_unused_parameters: true,
            ..options(1, 100)
        };
        let engine = engine(&communicator, options);
        let vb = builder(&engine);
        let pair = unit(vb, "pair", |vb| {
            Ok([weight(&vb, (8, 8), "used")?, weight(&vb, (8, 8), "unused")?])
        })
        .unwrap();
        engine.set_optimizer(sgd()).unwrap();
        for _ in 0..3 {
            let rows = Tensor::ones((3, 8), DType::F32, &Device::Cpu).unwrap();
            let output = pair.run(rows, |[used, _], rows| rows.matmul(used)).unwrap();
            engine.backward(&mean_square(&output).unwrap(), true).unwrap();
            assert_eq!(engine.memory().gathered, 0);
            engine.zero_grad();
        }
    });
}
