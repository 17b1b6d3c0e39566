//! Rules of their own for sets of parameters.

use super::optimizers::{KEPT, SHAPES, STEPS, TOLERANCE, cases, fixture, tensors, trace};
use super::oracle::{STEPS as BATCHES, new_model};
use super::skipped_steps::{STRATEGIES, share};
use super::{add, bits, deviation, engine, flat, linear_loss, on_ranks, parameters, values};
use candle_core::{DType, Device};
use sconce_zero::{
    Adagrad, Adam, AdamW, EngineOptions, Error, Lion, OptimizerRule, ParameterGroups, ParameterInfo, ParameterSet, Sgd,
    StateSlices, Update, WeightFiles, Weights,
};

fn named(name: &'static str) -> ParameterSet {
    ParameterSet::matching(move |parameter: &ParameterInfo| parameter.name == name)
}

/// A rule of the traces, as a type of its own.
#[derive(Debug)]
struct Traced(Box<dyn OptimizerRule>);

impl OptimizerRule for Traced {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn state_names(&self) -> &'static [&'static str] {
        self.0.state_names()
    }

    fn base_learning_rate(&self) -> f64 {
        self.0.base_learning_rate()
    }

    fn check(&self) -> sconce_zero::Result<()> {
        self.0.check()
    }

    fn update(&self, update: &Update, parameter: &mut [f32], gradient: &[f32], state: StateSlices<'_>) {
        self.0.update(update, parameter, gradient, state);
    }
}

fn traced(name: &str) -> Traced {
    let (_, rule) = cases()
        .into_iter()
        .find(|(case, _)| case == name)
        .expect("the case exists");
    Traced(rule)
}

#[test]
fn each_group_follows_pytorchs_trace_of_its_own_settings_and_rate() {
    // The rates are 1e-3, 3e-2 and 1e-2; updates are element by element, so a parameter's trace is its own.
    let cases = [("w", "adamw"), ("b", "adamw_hot"), ("x", "adam_l2")];
    let rule = ParameterGroups::new(traced("adamw"))
        .with(named("p0.b"), traced("adamw_hot"))
        .with(named("p0.x"), traced("adam_l2"));
    let (given, traces) = (tensors("grads.safetensors"), tensors("traces.safetensors"));
    let rate = rule.base_learning_rate();
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    let files = WeightFiles::open(&[fixture("grads.safetensors")]).unwrap();
    let vb = engine
        .var_builder(Weights::Files(files), DType::F32, &Device::Cpu)
        .unwrap();
    let parameters = SHAPES.map(|(name, shape)| vb.pp("p0").get(shape, name).unwrap());
    engine.set_optimizer(Box::new(rule)).unwrap();
    for step in 1..=STEPS {
        let losses = SHAPES.iter().zip(&parameters).map(|((name, _), parameter)| {
            let gradients = given[&format!("g.{name}")].get(step - 1).unwrap();
            linear_loss(parameter, &flat(&gradients))
        });
        let loss = losses.reduce(|a, b| add(a, &b)).unwrap();
        engine.backward(&loss, true).unwrap();
        engine.step(rate).unwrap();
        engine.zero_grad();
        if KEPT.contains(&step) {
            for ((name, case), parameter) in cases.iter().zip(&parameters) {
                let found = deviation(&flat(parameter), &trace(&traces, case, name, step));
                assert!(found <= TOLERANCE, "{name} by {case}, step {step}: {found}");
            }
        }
    }
}

/// Decayed weights, biases without decay and a tied weight at another rate.
fn groups() -> ParameterGroups {
    let decayed = AdamW {
        weight_decay: 0.3,
        ..AdamW::default()
    };
    let undecayed = AdamW {
        weight_decay: 0.0,
        ..decayed.clone()
    };
    let slow = Adam {
        learning_rate: 1e-4,
        ..Adam::default()
    };
    ParameterGroups::new(decayed)
        .with(ParameterSet::norms_and_biases(), undecayed)
        .with(named("tied.weight"), slow)
}

/// Trains with a rate that changes; returns all values by name.
fn train(
    world: usize,
    rule: impl Fn() -> Box<dyn OptimizerRule> + Sync,
    options: impl Fn() -> EngineOptions + Sync,
) -> Vec<Vec<(String, Vec<u32>)>> {
    on_ranks(world, |communicator| {
        let engine = engine(&communicator, options());
        let model = new_model(&engine);
        engine.set_optimizer(rule()).unwrap();
        for step in 0..BATCHES {
            let loss = share(&communicator, |rows, targets| model.loss(rows, targets), step);
            engine.backward(&loss, true).unwrap();
            engine.step(1e-3 / (step + 1) as f64).unwrap();
            engine.zero_grad();
        }
        let tensors = engine.tensors(true).unwrap();
        let named = |(name, tensor): (String, candle_core::Tensor)| (name, bits(&flat(&tensor)));
        tensors.into_iter().map(named).collect()
    })
}

#[test]
fn groups_give_the_same_bits_under_every_strategy() {
    for world in 1..=3 {
        let with = |strategy: usize, bucket| EngineOptions {
            strategy: STRATEGIES[strategy](),
            first_bucket_bytes: bucket,
            bucket_bytes: bucket,
            ..EngineOptions::default()
        };
        let expected = train(world, || Box::new(groups()), || with(0, 1 << 20));
        assert!(expected.iter().all(|rank| *rank == expected[0]));
        for strategy in 0..STRATEGIES.len() {
            for bucket in [0, 1 << 20] {
                let found = train(world, || Box::new(groups()), || with(strategy, bucket));
                assert!(
                    found == expected,
                    "world {world}, strategy {strategy}, buckets {bucket}"
                );
            }
        }
    }
}

#[test]
fn groups_of_equal_rules_give_the_bits_of_one_rule() {
    let rule = || AdamW {
        weight_decay: 0.3,
        ..AdamW::default()
    };
    let grouped = || ParameterGroups::new(rule()).with(ParameterSet::norms_and_biases(), rule());
    let one = train(2, || Box::new(rule()), EngineOptions::default);
    assert_eq!(train(2, || Box::new(grouped()), EngineOptions::default), one);
    // And of unequal ones others, for biases alone.
    let undecayed = AdamW {
        weight_decay: 0.0,
        ..rule()
    };
    let found = train(
        2,
        || Box::new(ParameterGroups::new(rule()).with(named("up.bias"), undecayed.clone())),
        EngineOptions::default,
    );
    for ((name, found), (_, expected)) in found[0].iter().zip(&one[0]) {
        // Every parameter feels the change through the gradients of later steps, up.bias from the first on.
        assert_ne!((name.as_str(), found), ("up.bias", expected));
    }
}

#[test]
fn a_rate_of_a_group_stays_in_proportion_to_the_optimizers() {
    let sgd = |learning_rate| Sgd {
        learning_rate,
        ..Sgd::default()
    };
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    let [a, b] = parameters(&engine, [("a", 2), ("b", 2)]);
    let rule = ParameterGroups::new(sgd(0.5)).with(named("b"), sgd(0.125));
    engine.set_optimizer(Box::new(rule)).unwrap();
    for rate in [0.5, 0.25, 0.0] {
        let before = values(&engine);
        engine
            .backward(&add(linear_loss(&a, &[1.0, 2.0]), &linear_loss(&b, &[1.0, 2.0])), true)
            .unwrap();
        engine.step(rate).unwrap();
        engine.zero_grad();
        let moved = [1.0, 2.0, 0.25, 0.5].map(|factor| factor * rate);
        let expected: Vec<f64> = before
            .iter()
            .zip(moved)
            .map(|(p, moved)| f64::from(*p) - moved)
            .collect();
        assert!(deviation(&values(&engine), &expected) < 1e-7, "rate {rate}");
    }
}

#[test]
fn groups_that_cannot_stand_together_are_named_with_the_reason() {
    let adamw = AdamW::default;
    let none = ParameterSet::none;
    let refused = [
        (
            ParameterGroups::new(adamw())
                .with(none(), adamw())
                .with(none(), Lion::default()),
            &["group 2 (lion)", "exp_avg_sq", "must keep the same"][..],
        ),
        (
            ParameterGroups::new(adamw()).with(
                none(),
                AdamW {
                    amsgrad: true,
                    ..adamw()
                },
            ),
            &["group 1 (adamw)", "max_exp_avg_sq"],
        ),
        (
            ParameterGroups::new(Adagrad::default()).with(
                none(),
                Adagrad {
                    initial_accumulator_value: 0.5,
                    ..Adagrad::default()
                },
            ),
            &["group 1 (adagrad)", "sum from 0.5", "sum from 0;"],
        ),
        (
            ParameterGroups::new(Sgd::default()).with(none(), adamw()),
            &["group 1 (adamw)", "no state"],
        ),
        (
            ParameterGroups::new(adamw()).with(
                none(),
                AdamW {
                    weight_decay: -1.0,
                    ..adamw()
                },
            ),
            &["group 1 (adamw)", "weight_decay is -1"],
        ),
        (
            ParameterGroups::new(adamw()).with(none(), ParameterGroups::new(adamw()).with(none(), adamw())),
            &["group 1 (adamw)", "groups of its own"],
        ),
        (
            ParameterGroups::new(AdamW {
                learning_rate: 0.0,
                ..adamw()
            })
            .with(none(), adamw()),
            &["group 1 (adamw)", "above 0"],
        ),
    ];
    for (rule, parts) in refused {
        let engine = engine(&sconce_collectives::single(), EngineOptions::default());
        let _p = parameters(&engine, [("p", 2)]);
        let error = engine.set_optimizer(Box::new(rule)).unwrap_err();
        assert!(matches!(error, Error::ParameterGroup { .. }), "{error}");
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn ranks_that_group_otherwise_are_told_so() {
    let errors = on_ranks(3, |communicator| {
        let engine = engine(&communicator, EngineOptions::default());
        let _p = parameters(&engine, [("a", 2), ("b", 2)]);
        let name = if communicator.rank() == 1 { "a" } else { "b" };
        let rule = ParameterGroups::new(Sgd::default()).with(named(name), Sgd::default());
        engine.set_optimizer(Box::new(rule)).unwrap_err().to_string()
    });
    for error in errors {
        let says = ["rank 1", "\"a\" [2] in parameter group 1", "rank 0 has \"a\" [2];"];
        assert!(says.iter().all(|part| error.contains(part)), "{error}");
    }
}
