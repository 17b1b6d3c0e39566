//! candle's own optimizers, and others of their kind, on shares of parameters.

use super::oracle::{STEPS, batch, new_model, plain_model};
use super::skipped_steps::{STRATEGIES, share};
use super::{add, bits, deviation, engine, flat, linear_loss, on_ranks, parameters, values};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW};
use sconce_collectives::Communicator;
use sconce_zero::{AdamW, CandleOptimizer, Engine, EngineOptions, Error, ParameterSet, Sgd, Stepped, Weights};
use std::sync::Arc;

const SETTINGS: ParamsAdamW = ParamsAdamW {
    lr: 1e-2,
    beta1: 0.9,
    beta2: 0.99,
    eps: 1e-7,
    weight_decay: 0.2,
};

fn ours() -> AdamW {
    AdamW {
        learning_rate: SETTINGS.lr,
        beta1: SETTINGS.beta1,
        beta2: SETTINGS.beta2,
        epsilon: SETTINGS.eps,
        weight_decay: SETTINGS.weight_decay,
        ..AdamW::default()
    }
}

/// Trains with what `set` sets and a rate that changes; returns all values.
fn train(
    communicator: &Arc<dyn Communicator>,
    options: EngineOptions,
    clipping: Option<f64>,
    set: impl FnOnce(&Engine),
) -> Vec<f32> {
    let engine = engine(communicator, options);
    let model = new_model(&engine);
    set(&engine);
    for step in 0..STEPS {
        let loss = share(communicator, |rows, targets| model.loss(rows, targets), step);
        engine.backward(&loss, true).unwrap();
        if let Some(max_norm) = clipping {
            engine.clip_grad_norm(max_norm).unwrap();
        }
        assert_eq!(engine.step(1e-2 / (step + 1) as f64).unwrap(), Stepped::Updated);
        engine.zero_grad();
    }
    values(&engine)
}

fn candle(engine: &Engine) {
    let optimizer = CandleOptimizer::new::<candle_nn::AdamW>(SETTINGS);
    assert_eq!(engine.set_candle_optimizer(optimizer).unwrap(), SETTINGS.lr);
}

/// Trains plain variables with candle's backward and AdamW, on whole batches.
fn plain() -> Vec<f32> {
    let (variables, model) = plain_model();
    let variables: Vec<Var> = variables.into_iter().map(|(_, variable)| variable).collect();
    let mut optimizer = candle_nn::AdamW::new(variables.clone(), SETTINGS).unwrap();
    for step in 0..STEPS {
        let (rows, targets) = batch(step);
        let gradients = model.loss(&rows, &targets).backward().unwrap();
        optimizer.set_learning_rate(1e-2 / (step + 1) as f64);
        optimizer.step(&gradients).unwrap();
    }
    variables.iter().flat_map(|variable| flat(variable)).collect()
}

#[test]
fn one_rank_gives_the_bits_of_candles_adamw_on_plain_variables() {
    let expected = bits(&plain());
    let single = sconce_collectives::single();
    for strategy in STRATEGIES {
        let options = EngineOptions {
            strategy: strategy(),
            ..EngineOptions::default()
        };
        assert_eq!(
            bits(&train(&single, options, None, candle)),
            expected,
            "{}",
            strategy().name()
        );
    }
}

#[test]
fn candles_adamw_on_shares_equals_ours_within_rounding_and_itself_under_every_strategy() {
    for world in 1..=3 {
        for clipping in [None, Some(0.05)] {
            let run = |strategy: usize, set: fn(&Engine)| {
                on_ranks(world, |communicator| {
                    let options = EngineOptions {
                        strategy: STRATEGIES[strategy](),
                        ..EngineOptions::default()
                    };
                    train(&communicator, options, clipping, set)
                })
            };
            let expected: Vec<f64> = run(0, |engine| engine.set_optimizer(Box::new(ours())).unwrap())[0]
                .iter()
                .map(|value| f64::from(*value))
                .collect();
            let replicated = run(0, candle);
            let found = deviation(&replicated[0], &expected);
            assert!(found < 2e-6, "world {world}: {found}");
            for strategy in 0..STRATEGIES.len() {
                for rank in run(strategy, candle) {
                    assert_eq!(bits(&rank), bits(&replicated[0]), "world {world}, strategy {strategy}");
                }
            }
        }
    }
}

/// Momentum as a user might write it; fails when it is told to.
#[derive(Debug)]
struct Momentum {
    variables: Vec<(Var, Tensor)>,
    rate: f64,
    fails_at: Option<usize>,
    steps: usize,
}

impl Optimizer for Momentum {
    type Config = Option<usize>;

    fn new(variables: Vec<Var>, fails_at: Option<usize>) -> candle_core::Result<Self> {
        let with_zeros = |variable: Var| {
            let zeros = variable.zeros_like()?;
            Ok((variable, zeros))
        };
        Ok(Self {
            variables: variables
                .into_iter()
                .map(with_zeros)
                .collect::<candle_core::Result<_>>()?,
            rate: 0.25,
            fails_at,
            steps: 0,
        })
    }

    fn step(&mut self, gradients: &GradStore) -> candle_core::Result<()> {
        for (variable, momentum) in &mut self.variables {
            let Some(gradient) = gradients.get(variable) else {
                continue;
            };
            *momentum = ((&*momentum * 0.5)? + gradient)?;
            variable.set(&(variable.as_tensor() - (&*momentum * self.rate)?)?)?;
        }
        self.steps += 1;
        if self.fails_at == Some(self.steps) {
            candle_core::bail!("the optimizer failed on purpose");
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.rate
    }

    fn set_learning_rate(&mut self, rate: f64) {
        self.rate = rate;
    }
}

#[test]
fn a_users_optimizer_gets_unscaled_gradients_of_what_was_used_and_sees_values_that_were_set() {
    for world in 1..=3 {
        for strategy in STRATEGIES {
            on_ranks(world, |communicator| {
                let options = EngineOptions {
                    strategy: strategy(),
                    loss_scaling: Some(sconce_zero::LossScaling::Static(256.0)),
                    find_unused_parameters: true,
                    ..EngineOptions::default()
                };
                let engine = engine(&communicator, options);
                // The scalar is smaller than the world: some ranks have no share of it.
                let [a, b, c] = parameters(&engine, [("a", 5), ("b", 1), ("c", 3)]);
                let rate = engine
                    .set_candle_optimizer(CandleOptimizer::new::<Momentum>(None))
                    .unwrap();
                assert_eq!(rate, 0.25);
                let set =
                    |scope: &sconce_zero::Gathered<'_>| scope.set("a", &Tensor::ones(5, DType::F32, &Device::Cpu)?);
                engine.edit(&ParameterSet::matching(|_| true), 0, set).unwrap();
                let before = values(&engine);
                let step = |loss: &Tensor| {
                    engine.backward(loss, true).unwrap();
                    engine.step(rate).unwrap();
                    engine.zero_grad();
                };
                step(&add(
                    linear_loss(&a, &[1.0, 2.0, 3.0, 4.0, 5.0]),
                    &linear_loss(&b, &[8.0]),
                ));
                step(&linear_loss(&a, &[4.0; 5]));
                // Momentum 0.5: the first gradient counts one and a half times, b's once.
                let moved = |i: usize| match i {
                    0..5 => 0.25 * (1.5 * (i + 1) as f64 + 4.0),
                    5 => 0.25 * 8.0,
                    _ => 0.0,
                };
                let expected: Vec<f64> = (0..9).map(|i| f64::from(before[i]) - moved(i)).collect();
                assert!(deviation(&values(&engine), &expected) < 1e-7);
                assert_eq!(flat(&a), values(&engine)[..5]);
                assert_eq!(flat(&c), before[6..]);
                // An overflow does not reach the optimizer.
                engine.backward(&linear_loss(&a, &[f32::NAN; 5]), true).unwrap();
                assert_eq!(engine.step(rate).unwrap(), Stepped::Skipped);
                assert!(deviation(&values(&engine), &expected) < 1e-7);
            });
        }
    }
}

#[test]
fn masters_of_16_bit_parameters_are_stepped_and_rounded() {
    for dtype in [DType::BF16, DType::F16] {
        for strategy in STRATEGIES {
            let run = |set: fn(&Engine)| {
                on_ranks(2, |communicator| {
                    let options = EngineOptions {
                        strategy: strategy(),
                        ..EngineOptions::default()
                    };
                    let engine = engine(&communicator, options);
                    let vb = engine
                        .var_builder(Weights::Random { seed: 2 }, dtype, &Device::Cpu)
                        .unwrap();
                    let w = vb
                        .get_with_hints(11, "w", candle_nn::Init::Randn { mean: 0.0, stdev: 1.0 })
                        .unwrap();
                    set(&engine);
                    // Each change is far below a rounding: only masters can add them up.
                    for _ in 0..64 {
                        engine
                            .backward(&w.to_dtype(DType::F32).unwrap().sum_all().unwrap(), true)
                            .unwrap();
                        engine.step(2f64.powi(-14)).unwrap();
                        engine.zero_grad();
                    }
                    flat(&w.to_dtype(DType::F32).unwrap())
                })
            };
            let found = run(|engine| {
                engine
                    .set_candle_optimizer(CandleOptimizer::new::<candle_nn::SGD>(1.0))
                    .unwrap();
            });
            let expected = run(|engine| engine.set_optimizer(Box::new(Sgd::default())).unwrap());
            assert_eq!(found, expected, "{dtype:?} {}", strategy().name());
        }
    }
}

#[test]
fn an_optimizer_that_fails_changes_nothing_on_its_rank_and_ends_all() {
    for fails_on_all in [true, false] {
        on_ranks(2, |communicator| {
            let options = EngineOptions {
                strategy: STRATEGIES[1](),
                ..EngineOptions::default()
            };
            let engine = engine(&communicator, options);
            let [p] = parameters(&engine, [("p", 4)]);
            let fails = fails_on_all || communicator.rank() == 1;
            let optimizer = CandleOptimizer::new::<Momentum>(fails.then_some(1));
            engine.set_candle_optimizer(optimizer).unwrap();
            let before = flat(&p);
            engine.backward(&linear_loss(&p, &[1.0; 4]), true).unwrap();
            let error = engine.step(0.5).unwrap_err().to_string();
            assert!(error.contains("failed on purpose"), "{error}");
            if fails {
                assert_eq!(flat(&p), before);
            }
        });
    }
}

#[test]
fn a_rule_and_a_candle_optimizer_take_each_others_place_and_frozen_parameters_have_no_variable() {
    let options = EngineOptions {
        frozen: ParameterSet::matching(|parameter| parameter.name == "frozen"),
        ..EngineOptions::default()
    };
    let engine = engine(&sconce_collectives::single(), options);
    let error = engine
        .set_candle_optimizer(CandleOptimizer::new::<candle_nn::SGD>(1.0))
        .unwrap_err();
    assert!(matches!(error, Error::Order { .. }), "{error}");
    let [p, _] = parameters(&engine, [("p", 3), ("frozen", 100)]);
    let step = || {
        let before = flat(&p);
        engine.backward(&linear_loss(&p, &[1.0; 3]), true).unwrap();
        engine.step(0.5).unwrap();
        engine.zero_grad();
        let expected: Vec<f64> = before.iter().map(|value| f64::from(*value) - 0.5).collect();
        assert!(deviation(&flat(&p), &expected) < 1e-7);
    };
    engine
        .set_candle_optimizer(CandleOptimizer::new::<candle_nn::SGD>(1.0))
        .unwrap();
    assert_eq!(engine.memory().masters, 12);
    step();
    engine.set_optimizer(Box::new(Sgd::default())).unwrap();
    assert_eq!(engine.memory().masters, 0);
    step();
    engine
        .set_candle_optimizer(CandleOptimizer::new::<candle_nn::SGD>(1.0))
        .unwrap();
    step();
}
