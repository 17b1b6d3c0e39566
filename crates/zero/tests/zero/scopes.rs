//! Scopes in which parameters are whole: for reading, and for editing from one rank.

use super::misuse::assert_says;
use super::parity::{SHARDED, WIDTH, builder, mean_square, rows, weight};
use super::{engine, flat, on_ranks, sgd, values};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::linear;
use sconce_collectives::Communicator;
use sconce_zero::{
    DataParallel, Engine, EngineOptions, Error, ParameterSet, ShardingStrategy, Weights, ZeroStage, unit,
};
use std::sync::Arc;

const STRATEGIES: [fn() -> Box<dyn ShardingStrategy>; 3] = [
    || Box::new(DataParallel),
    || Box::new(ZeroStage::Two),
    || Box::new(SHARDED),
];

fn new_engine(communicator: &Arc<dyn Communicator>, strategy: fn() -> Box<dyn ShardingStrategy>) -> Engine {
    let strategy = strategy();
    engine(
        communicator,
        EngineOptions {
            strategy,
            ..EngineOptions::default()
        },
    )
}

fn all() -> ParameterSet {
    ParameterSet::matching(|_| true)
}

fn named(name: &'static str) -> ParameterSet {
    ParameterSet::matching(move |parameter| parameter.name == name)
}

/// Runs a rule on 1 to 3 ranks under every strategy, with a model of two units and a parameter outside of them.
fn on_models(rule: impl Fn(&Engine) + Sync) {
    for strategy in STRATEGIES {
        for world in 1..=3 {
            on_ranks(world, |communicator| {
                let engine = new_engine(&communicator, strategy);
                let vb = builder(&engine);
                for name in ["a", "b"] {
                    unit(vb.clone(), name, |vb| weight(&vb, (WIDTH, 3), "weight")).unwrap();
                }
                weight(&vb, 2, "outside").unwrap();
                engine.set_optimizer(sgd()).unwrap();
                rule(&engine);
                assert_eq!(engine.memory().gathered, 0);
            });
        }
    }
}

/// A tensor of one value.
fn full(value: f32, shape: impl Into<candle_core::Shape>) -> Tensor {
    Tensor::full(value, shape, &Device::Cpu).unwrap()
}

#[test]
fn reading_gives_whole_values_of_what_was_asked_for() {
    on_models(|engine| {
        let expected = engine.tensors(true).unwrap();
        let read = |which: &ParameterSet| {
            engine.read(which, |scope| {
                scope
                    .names()
                    .map(|name| Ok((name.to_owned(), flat(&scope.get(name)?))))
                    .collect()
            })
        };
        let found: Vec<(String, Vec<f32>)> = read(&all()).unwrap();
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(name, tensor)| (name, flat(&tensor)))
            .collect();
        assert_eq!(found, expected);
        assert_eq!(read(&named("b.weight")).unwrap(), [expected[1].clone()]);
        assert_eq!(read(&ParameterSet::none()).unwrap(), []);
        let outcome = engine.read(&named("b.weight"), |scope| scope.get("a.weight"));
        assert!(matches!(outcome, Err(Error::NotGathered { .. })), "{outcome:?}");
    });
}

#[test]
fn what_is_read_is_a_copy_that_stays() {
    on_models(|engine| {
        let read = || engine.read(&all(), |scope| scope.get("a.weight")).unwrap();
        let before = read();
        let expected = flat(&before);
        let set = |scope: &sconce_zero::Gathered<'_>| scope.set("a.weight", &full(3.0, (WIDTH, 3)));
        engine.edit(&all(), 0, set).unwrap();
        assert_eq!(flat(&before), expected);
        assert_eq!(flat(&read()), [3.0; WIDTH * 3]);
    });
}

#[test]
fn every_rank_gets_what_the_editing_rank_set_and_nothing_else() {
    on_models(|engine| {
        let group = engine.communicator();
        let before = engine.tensors(true).unwrap();
        let before: Vec<_> = before.iter().map(|(_, tensor)| flat(tensor)).collect();
        for editor in 0..group.size() {
            let value = 10.0 + editor as f32;
            let edited = engine.edit(&all(), editor, |scope| {
                if group.rank() == editor {
                    scope.set("b.weight", &full(value, (WIDTH, 3)))?;
                    scope.set("outside", &full(-value, 2))?;
                } else {
                    // Only the editing rank's word counts.
                    scope.set("a.weight", &full(0.0, (WIDTH, 3)))?;
                    scope.set("b.weight", &full(0.0, (WIDTH, 3)))?;
                }
                Ok(scope.names().count())
            });
            assert_eq!(edited.unwrap(), 3);
            let after = engine.tensors(true).unwrap();
            assert_eq!(flat(&after[0].1), before[0]);
            assert_eq!(flat(&after[1].1), [value; WIDTH * 3]);
            assert_eq!(flat(&after[2].1), [-value; 2]);
        }
    });
}

#[test]
fn a_view_and_another_dtype_can_be_set() {
    on_models(|engine| {
        let numbers: Vec<f64> = (0..WIDTH * 3).map(|number| number as f64).collect();
        let turned = Tensor::from_vec(numbers, (3, WIDTH), &Device::Cpu)
            .unwrap()
            .t()
            .unwrap();
        engine
            .edit(&named("a.weight"), 0, |scope| scope.set("a.weight", &turned))
            .unwrap();
        let found = engine.read(&all(), |scope| scope.get("a.weight")).unwrap();
        assert_eq!(flat(&found), flat(&turned.to_dtype(DType::F32).unwrap()));
    });
}

#[test]
fn training_goes_on_from_what_was_edited() {
    let run = |strategy| {
        on_ranks(3, |communicator| {
            let engine = new_engine(&communicator, strategy);
            let vb = builder(&engine);
            let layer = |name: &str| unit(vb.clone(), name, |vb| linear(WIDTH, WIDTH, vb)).unwrap();
            let layers = [layer("first"), layer("last")];
            engine.set_optimizer(sgd()).unwrap();
            for step in 0..4 {
                let hidden = layers[0]
                    .forward(&rows(step, communicator.rank()))
                    .unwrap()
                    .tanh()
                    .unwrap();
                let loss = mean_square(&layers[1].forward(&hidden).unwrap()).unwrap();
                engine.backward(&loss, true).unwrap();
                engine.step(0.1).unwrap();
                engine.zero_grad();
                let double =
                    |scope: &sconce_zero::Gathered<'_>| scope.set("last.weight", &(scope.get("last.weight")? * 1.5)?);
                engine.edit(&named("last.weight"), step % 3, double).unwrap();
            }
            values(&engine)
        })
    };
    let expected = run(STRATEGIES[0]);
    for strategy in STRATEGIES {
        assert_eq!(run(strategy), expected);
    }
}

#[test]
fn an_edit_of_half_precision_parameters_sets_their_masters_unrounded() {
    for strategy in STRATEGIES {
        on_ranks(2, |communicator| {
            let engine = new_engine(&communicator, strategy);
            let vb = engine
                .var_builder(Weights::Random { seed: 3 }, DType::BF16, &Device::Cpu)
                .unwrap();
            let table = unit(vb, "table", |vb| weight(&vb, 3, "weight")).unwrap();
            engine.set_optimizer(sgd()).unwrap();
            let set = |scope: &sconce_zero::Gathered<'_>| scope.set("table.weight", &full(1.003, 3));
            engine.edit(&all(), 1, set).unwrap();
            let read = || {
                let found = engine.read(&all(), |scope| scope.get("table.weight")).unwrap();
                flat(&found.to_dtype(DType::F32).unwrap())
            };
            assert_eq!(read(), [1.0; 3]);
            let sum = table.run(Vec::new(), |weight, _: Vec<Tensor>| {
                weight.to_dtype(DType::F32)?.sum_all()?.neg()
            });
            engine.backward(&sum.unwrap(), true).unwrap();
            // 1.003 + 0.002 is nearer to 1 + 1/128 than to 1; from the rounded value it would not be.
            engine.step(0.002).unwrap();
            assert_eq!(read(), [1.0 + 1.0 / 128.0; 3]);
        });
    }
}

#[test]
fn wrong_edits_are_refused_by_name() {
    on_models(|engine| {
        let set = |scope: &sconce_zero::Gathered<'_>| scope.set("a.weight", &full(0.0, (WIDTH, 3)));
        assert_says(engine.read(&all(), set), &["\"a.weight\"", "Engine::edit"]);
        let editor = engine.communicator().size();
        assert_says(engine.edit(&all(), editor, set), &["rank", &editor.to_string()]);
        let shape = |scope: &sconce_zero::Gathered<'_>| {
            assert_says(scope.set("a.weight", &full(0.0, 3)), &["\"a.weight\"", "[3]", "[7, 3]"]);
            assert_says(scope.set("outside", &full(0.0, 2)), &["\"outside\"", "not gathered"]);
            Ok(())
        };
        engine.edit(&named("a.weight"), 0, shape).unwrap();
    });
}

#[test]
fn a_sharded_parameter_is_not_edited_within_a_scope_for_reading() {
    on_ranks(2, |communicator| {
        let engine = new_engine(&communicator, STRATEGIES[2]);
        unit(builder(&engine), "a", |vb| weight(&vb, (WIDTH, 3), "weight")).unwrap();
        engine.set_optimizer(sgd()).unwrap();
        let outcome = engine.read(&all(), |_| engine.edit(&all(), 0, |_| Ok(())));
        assert_says(outcome, &["scope for reading"]);
        engine.edit(&all(), 0, |_| engine.read(&all(), |_| Ok(()))).unwrap();
    });
}

#[test]
fn an_error_while_editing_ends_the_group_instead_of_leaving_peers_to_wait() {
    let errors = on_ranks(3, |communicator| {
        let engine = new_engine(&communicator, STRATEGIES[2]);
        unit(builder(&engine), "a", |vb| weight(&vb, (WIDTH, 3), "weight")).unwrap();
        engine.set_optimizer(sgd()).unwrap();
        let outcome = engine.edit(&all(), 0, |scope| match communicator.rank() {
            1 => scope.set("nobody", &full(0.0, 3)),
            _ => scope.set("a.weight", &full(0.0, (WIDTH, 3))),
        });
        outcome.unwrap_err().to_string()
    });
    errors
        .iter()
        .for_each(|error| assert!(error.contains("nobody"), "{errors:?}"));
}

#[test]
fn local_tensors_are_a_ranks_shares_and_make_up_the_whole_together() {
    for dtype in [DType::F32, DType::BF16] {
        for world in 1..=4 {
            let ranks = on_ranks(world, |communicator| {
                let engine = new_engine(&communicator, || Box::new(SHARDED));
                let vb = engine
                    .var_builder(Weights::Random { seed: 3 }, dtype, &Device::Cpu)
                    .unwrap();
                unit(vb.clone(), "layer", |vb| linear(WIDTH, 5, vb)).unwrap();
                weight(&vb, 2, "outside").unwrap();
                engine.set_optimizer(sgd()).unwrap();
                let wide = |tensor: &Tensor| flat(&tensor.to_dtype(DType::F32).unwrap());
                let whole = engine.tensors(true).unwrap();
                // Nothing beyond one unit's parameters is whole at once.
                assert_eq!(
                    engine.memory().gathered_peak as usize,
                    (WIDTH * 5 + 5) * dtype.size_in_bytes()
                );
                let whole = Vec::from_iter(whole.iter().map(|(name, tensor)| (name.clone(), wide(tensor))));
                let local = engine.local_tensors().unwrap().into_iter();
                let local = local.map(|t| {
                    (
                        t.info.name.clone(),
                        t.elements.clone(),
                        t.values.dtype(),
                        wide(&t.values),
                    )
                });
                (whole, Vec::from_iter(local))
            });
            for (name, expected) in &ranks[0].0 {
                let mut found = vec![f32::NAN; expected.len()];
                for (_, local) in &ranks {
                    let (_, elements, kind, values) = local.iter().find(|local| local.0 == *name).unwrap();
                    assert_eq!(*kind, dtype);
                    let share = if name == "outside" {
                        2
                    } else {
                        expected.len().div_ceil(world)
                    };
                    assert!(elements.len() <= share);
                    found[elements.clone()].copy_from_slice(values);
                }
                assert_eq!(&found, expected, "{name}, world {world}");
            }
        }
    }
}

#[test]
fn a_unit_that_is_unsharded_by_hand_stays_so_until_it_is_resharded() {
    for world in 1..=3 {
        on_ranks(world, |communicator| {
            let engine = new_engine(&communicator, || Box::new(SHARDED));
            let vb = builder(&engine);
            let layers = ["a", "b"].map(|name| unit(vb.clone(), name, |vb| linear(WIDTH, WIDTH, vb)).unwrap());
            engine.set_optimizer(sgd()).unwrap();
            let one = ((WIDTH * WIDTH + WIDTH) * size_of::<f32>()) as u64;
            let output = || layers[0].forward(&rows(0, 0)).unwrap();
            let expected = flat(&output());
            let weight = || flat(layers[0].module().weight());
            assert!(weight()[0].is_nan());
            for _ in 0..2 {
                layers[0].unshard().unwrap();
            }
            assert!(weight().iter().all(|value| value.is_finite() && *value != 0.0));
            assert_eq!(engine.memory().gathered, one);
            assert_eq!(flat(&output()), expected);
            assert_eq!(engine.memory().gathered, one);
            let loss = mean_square(&layers[1].forward(&output()).unwrap()).unwrap();
            engine.backward(&loss, true).unwrap();
            assert_says(engine.step(0.1), &["Unit::reshard"]);
            assert_eq!(engine.memory().gathered, one);
            for _ in 0..2 {
                layers[0].reshard().unwrap();
            }
            assert_eq!(engine.memory().gathered, 0);
            engine.step(0.1).unwrap();
            assert_ne!(flat(&output()), expected);
        });
    }
}
