//! Steps that some rank's gradients overflow in are skipped by all, and leave no trace.

use super::oracle::{ROWS, STEPS, batch, new_model};
use super::{add, bits, engine, flat, linear_loss, on_ranks, parameters, sgd, values};
use candle_core::Tensor;
use sconce_collectives::Communicator;
use sconce_zero::{
    AdamW, BackoffScaling, DataParallel, Engine, EngineOptions, Error, HysteresisScaling, LossScaling,
    ShardingStrategy, Stepped, ZeroStage,
};
use std::sync::Arc;

/// Every way to place state that the engine has a path for.
pub(super) const STRATEGIES: [fn() -> Box<dyn ShardingStrategy>; 5] = [
    || Box::new(DataParallel),
    || Box::new(ZeroStage::One),
    || Box::new(ZeroStage::Two),
    || Box::new(stage_three(0)),
    || Box::new(stage_three(17)),
];

fn stage_three(persistence_threshold: usize) -> ZeroStage {
    ZeroStage::Three { persistence_threshold }
}

/// Halves at every overflow, doubles after two steps without.
const BACKOFF: LossScaling = LossScaling::Backoff(BackoffScaling {
    initial_scale: 65536.0,
    growth_factor: 2.0,
    backoff_factor: 0.5,
    growth_interval: 2,
});

/// What was done with a step's gradients before it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Before {
    Nothing,
    ClippingByNorm,
    ClippingByValue,
    Norm,
    /// Clipping of what the first of two micro-batches left on this rank.
    ClippingInTheWindow,
}

const BEFORE: [Before; 5] = [
    Before::Nothing,
    Before::ClippingByNorm,
    Before::ClippingByValue,
    Before::Norm,
    Before::ClippingInTheWindow,
];

impl Before {
    fn run(self, engine: &Engine) {
        match self {
            Self::Nothing | Self::ClippingInTheWindow => {}
            Self::ClippingByNorm => drop(engine.clip_grad_norm(0.05).unwrap()),
            Self::ClippingByValue => engine.clip_grad_value(0.01).unwrap(),
            Self::Norm => drop(engine.grad_norm().unwrap()),
        }
    }
}

/// The steps that a run makes, and on which rank they overflow, if they do.
#[derive(Clone, Copy)]
struct Plan<'a> {
    steps: &'a [usize],
    overflow_step: usize,
    overflow_rank: usize,
    before: Before,
}

/// Trains with AdamW; returns the values after every step that updated.
fn train(world: usize, plan: Plan<'_>, options: impl Fn() -> EngineOptions + Sync) -> Vec<Vec<Vec<u32>>> {
    on_ranks(world, |communicator| {
        let engine = engine(&communicator, options());
        let model = new_model(&engine);
        engine.set_optimizer(Box::new(AdamW::default())).unwrap();
        let mut after = Vec::new();
        for &step in plan.steps {
            let before = bits(&values(&engine));
            let overflows = step == plan.overflow_step;
            let factor = if overflows && communicator.rank() == plan.overflow_rank {
                f64::from(f32::MAX)
            } else {
                1.0
            };
            let loss = (share(&communicator, |rows, targets| model.loss(rows, targets), step) * factor).unwrap();
            if plan.before == Before::ClippingInTheWindow {
                engine.backward(&loss, false).unwrap();
                engine.clip_grad_value(0.01).unwrap();
                let loss = share(&communicator, |rows, targets| model.loss(rows, targets), step);
                engine.backward(&loss, true).unwrap();
            } else {
                engine.backward(&loss, true).unwrap();
            }
            plan.before.run(&engine);
            let scale = engine.loss_scale();
            let stepped = engine.step(1e-2).unwrap();
            if overflows {
                assert_eq!(stepped, Stepped::Skipped);
                assert_eq!(bits(&values(&engine)), before);
                assert!(engine.loss_scale() < scale || engine.loss_scale_state().is_none());
            } else {
                assert_eq!(stepped, Stepped::Updated, "step {step}, {:?}", plan.before);
                after.push(bits(&values(&engine)));
                engine.zero_grad();
            }
        }
        let skipped = plan.steps.iter().filter(|step| **step == plan.overflow_step).count();
        assert_eq!(engine.skipped_steps(), skipped as u64);
        after
    })
}

/// The loss over this rank's share of a step's rows.
pub(super) fn share(
    communicator: &Arc<dyn Communicator>,
    loss: impl Fn(&Tensor, &Tensor) -> Tensor,
    step: usize,
) -> Tensor {
    let (rows, targets) = batch(step);
    let share = ROWS / communicator.size();
    let own = |tensor: Tensor| tensor.narrow(0, communicator.rank() * share, share).unwrap();
    loss(&own(rows), &own(targets))
}

#[test]
fn overflow_on_one_rank_skips_the_step_on_all_as_if_its_batch_had_not_been() {
    let all: Vec<usize> = (0..STEPS).collect();
    let others: Vec<usize> = all.iter().copied().filter(|step| *step != 2).collect();
    for world in 1..=3 {
        for before in BEFORE {
            let plan = |steps| Plan {
                steps,
                overflow_step: 2,
                overflow_rank: world - 1,
                before,
            };
            for strategy in STRATEGIES {
                let unscaled = || EngineOptions {
                    strategy: strategy(),
                    ..EngineOptions::default()
                };
                let scaled = || EngineOptions {
                    loss_scaling: Some(BACKOFF),
                    ..unscaled()
                };
                // Scales are powers of 2, so that the scaled run has the bits of one that never saw a scale.
                let expected = train(world, plan(&others), unscaled);
                let name = strategy().name().to_owned();
                assert!(expected.iter().all(|rank| *rank == expected[0]));
                assert_eq!(
                    train(world, plan(&all), scaled),
                    expected,
                    "{name}, world {world}, {before:?}"
                );
            }
        }
    }
}

#[test]
fn steps_are_skipped_without_loss_scaling_when_that_is_asked_for() {
    let all: Vec<usize> = (0..3).collect();
    for strategy in STRATEGIES {
        let options = |skip_nonfinite| EngineOptions {
            strategy: strategy(),
            skip_nonfinite,
            ..EngineOptions::default()
        };
        let plan = |steps, overflow_step| Plan {
            steps,
            overflow_step,
            overflow_rank: 0,
            before: Before::Nothing,
        };
        let run = || {
            on_ranks(2, |communicator| {
                let engine = engine(&communicator, options(true));
                let model = new_model(&engine);
                engine.set_optimizer(sgd()).unwrap();
                let loss = share(&communicator, |rows, targets| model.loss(rows, targets), 0);
                let factor = if communicator.rank() == 1 { f64::NAN } else { 1.0 };
                engine.backward(&(loss * factor).unwrap(), true).unwrap();
                let before = bits(&values(&engine));
                assert_eq!(engine.step(1.0).unwrap(), Stepped::Skipped);
                assert_eq!((engine.loss_scale(), engine.loss_scale_state()), (1.0, None));
                assert_eq!(bits(&values(&engine)), before);
            })
        };
        run();
        // Where all is finite nothing changes.
        let expected = train(2, plan(&all, usize::MAX), || options(false));
        assert_eq!(train(2, plan(&all, usize::MAX), || options(true)), expected);
    }
}

#[test]
fn a_skipped_step_forgets_its_gradients() {
    let options = EngineOptions {
        skip_nonfinite: true,
        ..EngineOptions::default()
    };
    let engine = engine(&sconce_collectives::single(), options);
    let [p] = parameters(&engine, [("p", 2)]);
    engine.set_optimizer(sgd()).unwrap();
    engine.backward(&linear_loss(&p, &[f32::INFINITY, 1.0]), true).unwrap();
    assert_eq!(engine.step(1.0).unwrap(), Stepped::Skipped);
    assert!(matches!(engine.step(1.0), Err(Error::Order { .. })));
    assert_eq!(engine.grad_norm().unwrap(), 0.0);
    // The next backward begins anew, without a zero_grad.
    engine.backward(&linear_loss(&p, &[3.0, 4.0]), true).unwrap();
    assert_eq!(engine.grad_norm().unwrap(), 5.0);
    assert_eq!(engine.step(1.0).unwrap(), Stepped::Updated);
}

#[test]
fn one_element_is_seen_whichever_rank_holds_it_also_of_an_earlier_micro_batch() {
    // With three ranks each of the elements belongs to another.
    let places = [(0, 0, 0), (0, 1, 1), (0, 0, 2), (1, 0, 1), (1, 1, 0), (1, 1, 2)];
    for (broken, strategy) in places
        .into_iter()
        .flat_map(|place| (0..3).map(move |strategy| (place, strategy)))
    {
        let stepped = on_ranks(3, |communicator| {
            let options = EngineOptions {
                strategy: STRATEGIES[strategy](),
                skip_nonfinite: true,
                first_bucket_bytes: 0,
                bucket_bytes: 0,
                ..EngineOptions::default()
            };
            let engine = engine(&communicator, options);
            let tensors = parameters(&engine, [("a", 3), ("b", 3)]);
            engine.set_optimizer(sgd()).unwrap();
            for micro in 0..2 {
                let [a, b] = [0, 1].map(|number| {
                    let mut gradient = [1.0; 3];
                    if (micro, number) == (broken.0, broken.1) && communicator.rank() == 1 {
                        gradient[broken.2] = f32::NEG_INFINITY;
                    }
                    linear_loss(&tensors[number], &gradient)
                });
                engine.backward(&add(a, &b), micro == 1).unwrap();
            }
            engine.step(1.0).unwrap()
        });
        assert_eq!(stepped, [Stepped::Skipped; 3], "{broken:?}, strategy {strategy}");
    }
}

#[test]
fn clipping_by_value_does_not_hide_an_infinity_whatever_came_before_or_after() {
    type Clipping = (bool, fn(&Engine));
    let clip = |engine: &Engine| engine.clip_grad_value(1.0).unwrap();
    let orders: [Clipping; 4] = [
        (false, clip),
        (true, clip),
        (false, |engine| {
            engine.grad_norm().unwrap();
            engine.clip_grad_value(1.0).unwrap();
        }),
        (false, |engine| {
            engine.clip_grad_value(1.0).unwrap();
            assert!(engine.clip_grad_norm(1.0).unwrap().is_finite());
        }),
    ];
    for ((in_the_window, clipping), strategy) in orders.into_iter().flat_map(|order| (0..3).map(move |s| (order, s))) {
        let stepped = on_ranks(2, |communicator| {
            let options = EngineOptions {
                strategy: STRATEGIES[strategy](),
                skip_nonfinite: true,
                ..EngineOptions::default()
            };
            let engine = engine(&communicator, options);
            let [p] = parameters(&engine, [("p", 4)]);
            engine.set_optimizer(sgd()).unwrap();
            let last = if communicator.rank() == 0 { f32::INFINITY } else { 1.0 };
            let broken = linear_loss(&p, &[1.0, 1.0, 1.0, last]);
            engine.backward(&broken, !in_the_window).unwrap();
            clipping(&engine);
            if in_the_window {
                engine.backward(&linear_loss(&p, &[1.0; 4]), true).unwrap();
            }
            let skipped = engine.step(1.0).unwrap();
            // The next window is not held responsible.
            engine.backward(&linear_loss(&p, &[1.0; 4]), true).unwrap();
            clipping(&engine);
            (skipped, engine.step(1.0).unwrap())
        });
        assert_eq!(stepped, [(Stepped::Skipped, Stepped::Updated); 2]);
    }
}

#[test]
fn a_norm_of_all_gradients_saves_the_pass_and_the_exchange() {
    let calls = |norm_first: bool| {
        on_ranks(2, |communicator| {
            let options = EngineOptions {
                skip_nonfinite: true,
                ..EngineOptions::default()
            };
            let engine = engine(&communicator, options);
            let [p] = parameters(&engine, [("p", 40)]);
            engine.set_optimizer(sgd()).unwrap();
            engine.backward(&linear_loss(&p, &[1.0; 40]), true).unwrap();
            if norm_first {
                engine.clip_grad_norm(1.0).unwrap();
            }
            let count = || communicator.traffic().iter().map(|kind| kind.calls).sum::<u64>();
            let before = count();
            assert_eq!(engine.step(1.0).unwrap(), Stepped::Updated);
            count() - before
        })
    };
    assert_eq!(calls(true), [0, 0]);
    assert_eq!(calls(false), [1, 1]);
}

#[test]
fn overflow_at_the_smallest_scale_is_deepspeeds_error_on_every_rank_and_changes_nothing() {
    on_ranks(2, |communicator| {
        let options = EngineOptions {
            loss_scaling: Some(LossScaling::Hysteresis(HysteresisScaling {
                initial_scale: 2.0,
                hysteresis: 1,
                ..HysteresisScaling::default()
            })),
            ..EngineOptions::default()
        };
        let engine = engine(&communicator, options);
        let [p] = parameters(&engine, [("p", 2)]);
        engine.set_optimizer(sgd()).unwrap();
        let before = bits(&flat(&p));
        for overflow in 0..3 {
            let value = if communicator.rank() == 1 { f32::INFINITY } else { 1.0 };
            engine.backward(&linear_loss(&p, &[value, 1.0]), true).unwrap();
            match engine.step(1.0) {
                Ok(stepped) => assert_eq!((stepped, overflow), (Stepped::Skipped, 0)),
                Err(error) => assert!(
                    overflow > 0 && matches!(error, Error::LossScaleAtMinimum { minimum: 1.0 }),
                    "{error}"
                ),
            }
            assert_eq!((bits(&flat(&p)), engine.loss_scale()), (before.clone(), 1.0));
        }
        // Not an end: with finite gradients it goes on.
        engine.backward(&linear_loss(&p, &[1.0, 1.0]), true).unwrap();
        assert_eq!(engine.step(1.0).unwrap(), Stepped::Updated);
    });
}
