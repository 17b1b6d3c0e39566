//! Parameters that get no gradient: an error by default, allowed on request.

use super::{add, bits, buckets, deviation, engine, flat, linear_loss, on_ranks, parameters, sgd, values};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, linear_no_bias, rms_norm};
use sconce_zero::{AdamW, Engine, EngineOptions, Error, OptimizerRule, Sgd, StateSlices, Update, Weights};

fn allowing() -> EngineOptions {
    EngineOptions {
        find_unused_parameters: true,
        ..buckets(0, 0)
    }
}

#[test]
fn an_unused_parameter_is_an_error_on_every_rank_that_names_it_and_the_usual_cause() {
    for world in 1..=4 {
        let errors = on_ranks(world, |communicator| {
            let engine = engine(&communicator, EngineOptions::default());
            let [used, _unused] = parameters(&engine, [("used.weight", 3), ("unused.weight", 4)]);
            engine.set_optimizer(sgd()).unwrap();
            engine
                .backward(&linear_loss(&used, &[1.0; 3]), true)
                .unwrap_err()
                .to_string()
        });
        for error in errors {
            for part in ["unused.weight", "softmax_last_dim", "find_unused_parameters"] {
                assert!(error.contains(part), "world {world}: {part} in {error}");
            }
            assert!(!error.contains(" used.weight"), "world {world}: {error}");
        }
    }
}

#[test]
fn a_parameter_that_one_rank_does_not_use_is_an_error_on_every_rank_in_the_first_and_in_later_backwards() {
    for world in 2..=4 {
        for lazy_rank in [0, world - 1] {
            for bad_step in [0, 1] {
                let errors = on_ranks(world, |communicator| {
                    let engine = engine(&communicator, buckets(0, 0));
                    let [a, b] = parameters(&engine, [("a", 3), ("b.weight", 3)]);
                    engine.set_optimizer(sgd()).unwrap();
                    for step in 0.. {
                        let mut loss = linear_loss(&a, &[1.0; 3]);
                        if step != bad_step || communicator.rank() != lazy_rank {
                            loss = add(loss, &linear_loss(&b, &[1.0; 3]));
                        }
                        if let Err(error) = engine.backward(&loss, true) {
                            return (step, error.to_string());
                        }
                    }
                    unreachable!()
                });
                for (step, error) in errors {
                    assert_eq!(step, bad_step, "{error}");
                    assert!(error.contains("b.weight"), "world {world}, rank {lazy_rank}: {error}");
                }
            }
        }
    }
}

#[test]
fn after_such_an_error_nothing_can_be_read_or_stepped() {
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    let [a, b] = parameters(&engine, [("a", 3), ("b", 3)]);
    engine.set_optimizer(sgd()).unwrap();
    engine
        .backward(&add(linear_loss(&a, &[1.0; 3]), &linear_loss(&b, &[1.0; 3])), true)
        .unwrap();
    let before = values(&engine);
    assert!(matches!(
        engine.backward(&linear_loss(&a, &[1.0; 3]), true),
        Err(Error::NoGradient { .. })
    ));
    assert!(matches!(engine.grad_norm(), Err(Error::Order { .. })));
    assert!(matches!(engine.clip_grad_norm(1.0), Err(Error::Order { .. })));
    engine.zero_grad();
    assert!(matches!(engine.step(1.0), Err(Error::Order { .. })));
    assert_eq!(values(&engine), before);
}

#[test]
fn candles_rms_norm_in_the_middle_is_found() {
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    let vb = engine
        .var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)
        .unwrap();
    let before = linear_no_bias(4, 4, vb.pp("before")).unwrap();
    let norm = rms_norm(4, 1e-5, vb.pp("norm")).unwrap();
    let after = linear_no_bias(4, 1, vb.pp("after")).unwrap();
    let rows = Tensor::ones((2, 4), DType::F32, &Device::Cpu).unwrap();
    let hidden = norm.forward(&before.forward(&rows).unwrap()).unwrap();
    let loss = after.forward(&hidden).unwrap().mean_all().unwrap();
    match engine.backward(&loss, true).unwrap_err() {
        Error::NoGradient { names } => assert_eq!(names, ["before.weight", "norm.weight"]),
        other => panic!("{other}"),
    }
}

/// Parameter `all` is used by all ranks, `first` by rank 0 only, `none` by no rank.
struct Uneven {
    engine: Engine,
    all: Tensor,
    first: Tensor,
    is_first: bool,
}

impl Uneven {
    fn new(communicator: &std::sync::Arc<dyn sconce_collectives::Communicator>, rule: Box<dyn OptimizerRule>) -> Self {
        let engine = engine(communicator, allowing());
        let [all, first, _none] = parameters(&engine, [("all", 2), ("first", 2), ("none", 2)]);
        engine.set_optimizer(rule).unwrap();
        Self {
            engine,
            all,
            first,
            is_first: communicator.rank() == 0,
        }
    }

    fn backward(&self, synchronise: bool) {
        let mut loss = linear_loss(&self.all, &[1.0, 2.0]);
        if self.is_first {
            loss = add(loss, &linear_loss(&self.first, &[12.0, 24.0]));
        }
        self.engine.backward(&loss, synchronise).unwrap();
    }
}

#[test]
fn a_parameter_used_on_one_rank_gets_the_mean_with_zeros_and_one_used_nowhere_stays_as_it_is() {
    for world in 1..=4 {
        let ranks = on_ranks(world, |communicator| {
            let rule = Sgd {
                weight_decay: 0.5,
                ..Sgd::default()
            };
            let uneven = Uneven::new(&communicator, Box::new(rule));
            let before = values(&uneven.engine);
            uneven.backward(true);
            let norm = uneven.engine.grad_norm().unwrap();
            uneven.engine.step(1.0).unwrap();
            (before, norm, values(&uneven.engine))
        });
        let (before, _, after) = &ranks[0];
        let share = 1.0 / world as f64;
        let gradients = [1.0, 2.0, 12.0 * share, 24.0 * share];
        let expected: Vec<f64> = (0..4).map(|i| 0.5 * f64::from(before[i]) - gradients[i]).collect();
        assert!(deviation(&after[..4], &expected) < 1e-6, "world {world}");
        assert_eq!(after[4..], before[4..], "world {world}");
        let norm = gradients.iter().map(|g| g * g).sum::<f64>().sqrt();
        for (_, found, values) in &ranks {
            assert!(
                (found / norm - 1.0).abs() < 1e-6,
                "world {world}: {found}, expected {norm}"
            );
            assert_eq!(bits(values), bits(after), "world {world}");
        }
    }
}

#[test]
fn a_parameter_no_longer_used_counts_as_zeros_not_as_its_gradient_of_the_step_before() {
    for world in 1..=4 {
        let ranks = on_ranks(world, |communicator| {
            let engine = engine(&communicator, allowing());
            let [all, some] = parameters(&engine, [("all", 2), ("some", 2)]);
            engine.set_optimizer(sgd()).unwrap();
            let one = || linear_loss(&all, &[1.0, 2.0]);
            let both = || add(one(), &linear_loss(&some, &[100.0, 200.0]));
            engine.backward(&both(), true).unwrap();
            engine.zero_grad();
            engine
                .backward(&if communicator.rank() == 0 { both() } else { one() }, true)
                .unwrap();
            let before = flat(&some);
            engine.step(1.0).unwrap();
            before.iter().zip(flat(&some)).map(|(b, a)| b - a).collect::<Vec<f32>>()
        });
        let expected = [100.0 / world as f64, 200.0 / world as f64];
        for found in ranks {
            assert!(deviation(&found, &expected) < 1e-6, "world {world}: {found:?}");
        }
    }
}

#[test]
fn clipping_keeps_ranks_equal_when_they_use_different_parameters() {
    for world in 2..=4 {
        let ranks = on_ranks(world, |communicator| {
            let uneven = Uneven::new(&communicator, sgd());
            uneven.backward(true);
            let norm = uneven.engine.clip_grad_norm(0.5).unwrap();
            uneven.engine.step(1.0).unwrap();
            (norm.to_bits(), bits(&values(&uneven.engine)))
        });
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "world {world}");
    }
}

#[test]
fn uneven_use_accumulates_over_backwards() {
    for world in 1..=4 {
        for flags in [[true, true, true], [false, false, true], [false, true, true]] {
            let ranks = on_ranks(world, |communicator| {
                let uneven = Uneven::new(&communicator, sgd());
                let before = flat(&uneven.first);
                flags.into_iter().for_each(|synchronise| uneven.backward(synchronise));
                uneven.engine.step(1.0).unwrap();
                let taken_off: Vec<f32> = before.iter().zip(flat(&uneven.first)).map(|(b, a)| b - a).collect();
                taken_off
            });
            let expected = [36.0 / world as f64, 72.0 / world as f64];
            for found in ranks {
                assert!(
                    deviation(&found, &expected) < 1e-5,
                    "world {world}, {flags:?}: {found:?}"
                );
            }
        }
    }
}

#[test]
fn a_parameter_that_no_rank_used_at_first_takes_its_own_first_step_later_as_in_pytorch() {
    for world in 1..=2 {
        on_ranks(world, |communicator| {
            let engine = engine(&communicator, allowing());
            let [early, late] = parameters(&engine, [("early", 2), ("late", 2)]);
            let rule = AdamW {
                weight_decay: 0.1,
                ..AdamW::default()
            };
            engine.set_optimizer(Box::new(rule.clone())).unwrap();
            let mut expected = flat(&late);
            for _ in 0..3 {
                engine.backward(&linear_loss(&early, &[1.0, 1.0]), true).unwrap();
                engine.step(0.01).unwrap();
                engine.zero_grad();
            }
            assert_eq!(flat(&late), expected);
            let gradient = [0.5, -3.0];
            engine
                .backward(
                    &add(linear_loss(&early, &[1.0, 1.0]), &linear_loss(&late, &gradient)),
                    true,
                )
                .unwrap();
            engine.step(0.01).unwrap();
            let update = Update {
                learning_rate: 0.01,
                step: 1,
                gradient_scale: 1.0,
            };
            let (mut first, mut second) = ([0.0; 2], [0.0; 2]);
            rule.update(
                &update,
                &mut expected,
                &gradient,
                StateSlices([&mut first, &mut second, &mut []]),
            );
            assert_eq!(bits(&flat(&late)), bits(&expected));
        });
    }
}
