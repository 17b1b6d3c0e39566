//! Parts that compute again in the backward: how often, which, and with what they share.
//!
//! That every model of `units`, `frozen` and `interleaving` comes to the same bits so is part of [`parity`](super::parity).

use super::parity::{Case, SHARDED, WIDTH, builder, mean_square, rows, weight};
use super::{bits, engine, flat, on_ranks, sgd, values};
use candle_core::{Module, Tensor};
use candle_nn::linear;
use sconce_zero::{DataParallel, EngineOptions, RandomState, ShardingStrategy, Unit, UnitPolicy, unit, unit_of_class};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

fn of_class(class: &'static str) -> UnitPolicy {
    UnitPolicy::matching(move |part| part.class == class)
}

fn options(strategy: impl ShardingStrategy + 'static, recompute: UnitPolicy) -> EngineOptions {
    EngineOptions {
        strategy: Box::new(strategy),
        recompute,
        ..EngineOptions::default()
    }
}

#[test]
fn a_part_runs_once_more_for_each_backward_and_not_for_an_evaluation() {
    let strategies: [fn(UnitPolicy) -> EngineOptions; 2] = [
        |recompute| options(DataParallel, recompute),
        |recompute| options(SHARDED, recompute),
    ];
    for strategy in strategies {
        for (recompute, expected) in [(UnitPolicy::none(), [1, 1, 2]), (UnitPolicy::all(), [1, 2, 3])] {
            on_ranks(2, |communicator| {
                let engine = engine(&communicator, strategy(recompute.clone()));
                let layer = unit(builder(&engine), "layer", |vb| linear(WIDTH, WIDTH, vb)).unwrap();
                engine.set_optimizer(sgd()).unwrap();
                let runs = Arc::new(AtomicUsize::new(0));
                let forward = || {
                    let runs = Arc::clone(&runs);
                    let output = layer.run(rows(0, communicator.rank()), move |layer, rows| {
                        runs.fetch_add(1, Relaxed);
                        layer.forward(&rows)
                    });
                    mean_square(&output.unwrap()).unwrap()
                };
                let mut found = Vec::new();
                let loss = forward();
                found.push(runs.load(Relaxed));
                engine.backward(&loss, true).unwrap();
                found.push(runs.load(Relaxed));
                drop(loss);
                engine.step(0.1).unwrap();
                drop(forward());
                found.push(runs.load(Relaxed));
                assert_eq!(found, expected);
            });
        }
    }
}

#[test]
fn a_part_draws_again_what_it_drew_and_other_draws_go_on() {
    let run = |recompute: UnitPolicy| {
        let engine = engine(&sconce_collectives::single(), options(SHARDED, recompute));
        let layer = unit(builder(&engine), "layer", |vb| linear(WIDTH, WIDTH, vb)).unwrap();
        engine.set_optimizer(sgd()).unwrap();
        RandomState::seed(1);
        let noisy = |rows: Tensor| {
            layer.run(rows, |layer, rows| {
                layer.forward(&rows)? * (RandomState::draw_key() as f64 / 2f64.powi(64))
            })
        };
        let output = noisy(noisy(rows(0, 0)).unwrap().tanh().unwrap()).unwrap();
        let before = RandomState::current();
        engine.backward(&mean_square(&output).unwrap(), true).unwrap();
        assert_eq!(RandomState::current(), before);
        engine.step(0.1).unwrap();
        let tensors = engine.tensors(true).unwrap();
        tensors
            .iter()
            .map(|(_, tensor)| bits(&flat(tensor)))
            .collect::<Vec<_>>()
    };
    assert_eq!(run(UnitPolicy::all()), run(UnitPolicy::none()));
}

#[test]
fn one_graph_may_be_differentiated_twice() {
    for recompute in [UnitPolicy::none(), UnitPolicy::all()] {
        let engine = engine(&sconce_collectives::single(), options(SHARDED, recompute));
        let layer = unit(builder(&engine), "layer", |vb| linear(WIDTH, WIDTH, vb)).unwrap();
        engine.set_optimizer(sgd()).unwrap();
        let hidden = layer.forward(&rows(0, 0)).unwrap().tanh().unwrap();
        let loss = mean_square(&layer.forward(&hidden).unwrap()).unwrap();
        engine.backward(&loss, true).unwrap();
        let once = engine.grad_norm().unwrap();
        engine.backward(&loss, true).unwrap();
        assert_eq!(engine.grad_norm().unwrap(), 2.0 * once);
    }
}

type Tied = Unit<(Tensor, Tensor)>;

/// Parts of the classes A, B and A, which have one parameter in common and one of their own.
fn tied(vb: candle_nn::VarBuilder<'_>) -> candle_core::Result<[Tied; 3]> {
    let part = |name: &str, class: &str| {
        unit_of_class(vb.clone(), name, class, |own| {
            Ok((weight(&vb, (WIDTH, WIDTH), "tied")?, weight(&own, WIDTH, "own")?))
        })
    };
    Ok([part("first", "A")?, part("second", "B")?, part("third", "A")?])
}

fn through(parts: &[Tied; 3], rows: &Tensor) -> candle_core::Result<Tensor> {
    let mut hidden = rows.clone();
    for part in parts {
        hidden = part.run(hidden, |(tied, own), hidden| {
            hidden.matmul(tied)?.broadcast_mul(own)?.tanh()
        })?;
    }
    mean_square(&hidden)
}

#[test]
fn a_parameter_of_parts_that_compute_again_and_parts_that_do_not_gets_all_its_gradients() {
    for recompute in ["A", "B"] {
        for units in [UnitPolicy::all(), UnitPolicy::none(), of_class("A"), of_class("B")] {
            Case::new(tied, through).check_policies(&units, &of_class(recompute));
        }
    }
}

struct Block {
    before: Tensor,
    inner: Unit<candle_nn::Linear>,
}

impl Module for Block {
    fn forward(&self, rows: &Tensor) -> candle_core::Result<Tensor> {
        self.inner.forward(&rows.matmul(&self.before)?.tanh()?)?.gelu()
    }
}

#[test]
fn parts_within_parts_may_be_units_or_compute_again_each_for_itself() {
    let case = || {
        Case::new(
            |vb| {
                let block = |name: &str| {
                    unit_of_class(vb.clone(), name, "Block", |vb| {
                        Ok(Block {
                            before: weight(&vb, (WIDTH, 5), "before")?,
                            inner: unit_of_class(vb, "inner", "Inner", |vb| linear(5, WIDTH, vb))?,
                        })
                    })
                };
                Ok([block("first")?, block("second")?])
            },
            |[first, second], rows| {
                let hidden = first.forward(rows)?;
                // One part twice.
                mean_square(&first.forward(&(second.forward(&hidden)? + hidden)?)?)
            },
        )
    };
    let policies = || {
        [
            UnitPolicy::all(),
            UnitPolicy::none(),
            of_class("Block"),
            of_class("Inner"),
        ]
    };
    for units in policies() {
        for recompute in policies() {
            case().check_policies(&units, &recompute);
        }
    }
}

#[test]
fn a_parameter_that_the_second_run_does_not_use_counts_as_the_engine_counts_unused_ones() {
    let run = |recompute: UnitPolicy| {
        on_ranks(2, |communicator| {
            let options = EngineOptions {
                find_unused_parameters: true,
                ..options(SHARDED, recompute.clone())
            };
            let engine = engine(&communicator, options);
            let part = unit(builder(&engine), "part", |vb| {
                Ok((weight(&vb, (WIDTH, WIDTH), "used")?, weight(&vb, WIDTH, "idle")?))
            });
            let part = part.unwrap();
            engine.set_optimizer(sgd()).unwrap();
            let output = part.run(rows(0, communicator.rank()), |(used, _), rows| rows.matmul(used));
            engine.backward(&mean_square(&output.unwrap()).unwrap(), true).unwrap();
            engine.step(0.1).unwrap();
            bits(&values(&engine))
        })
    };
    assert_eq!(run(UnitPolicy::all()), run(UnitPolicy::none()));
}

#[test]
fn what_fails_only_in_the_second_run_ends_the_backward_on_every_rank_with_its_words() {
    let errors = on_ranks(2, |communicator| {
        let engine = engine(&communicator, options(SHARDED, UnitPolicy::all()));
        let layer = unit(builder(&engine), "layer", |vb| linear(WIDTH, WIDTH, vb)).unwrap();
        engine.set_optimizer(sgd()).unwrap();
        let (runs, fails) = (AtomicUsize::new(0), communicator.rank() == 1);
        let output = layer.run(rows(0, 0), move |layer, rows| {
            if fails && runs.fetch_add(1, Relaxed) == 1 {
                candle_core::bail!("the lamp went out");
            }
            layer.forward(&rows)
        });
        let loss = mean_square(&output.unwrap()).unwrap();
        engine.backward(&loss, true).unwrap_err().to_string()
    });
    assert!(
        errors.iter().all(|error| error.contains("the lamp went out")),
        "{errors:?}"
    );
}

#[test]
fn what_is_asked_for_and_not_done_is_told() {
    let with = |units: UnitPolicy, recompute: UnitPolicy, declares: bool| {
        let options = EngineOptions {
            units,
            ..options(SHARDED, recompute)
        };
        let engine = engine(&sconce_collectives::single(), options);
        let vb = builder(&engine);
        if declares {
            unit(vb, "layer", |vb| linear(WIDTH, WIDTH, vb)).unwrap();
        } else {
            linear(WIDTH, WIDTH, vb.pp("layer")).unwrap();
        }
        engine.set_optimizer(sgd()).unwrap();
        engine.notices()
    };
    let (all, none) = (UnitPolicy::all, UnitPolicy::none);
    assert_eq!(with(all(), all(), true), [""; 0]);
    let large = || UnitPolicy::matching(|part| part.elements > 56);
    for (notices, parts) in [
        (
            with(none(), none(), true),
            vec!["no parameter is sharded, all are whole on every rank: the policy"],
        ),
        (
            with(large(), large(), true),
            vec!["none of the 1 parts", "has 56 elements"],
        ),
        (
            with(all(), all(), false),
            vec!["no parameter is sharded", "nothing computes again", "declares no parts"],
        ),
    ] {
        let text = notices.join("; ");
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
fn a_part_that_comes_to_other_results_the_second_time_is_named() {
    let engine = engine(&sconce_collectives::single(), options(SHARDED, UnitPolicy::all()));
    let layer = unit(builder(&engine), "fickle", |vb| linear(WIDTH, WIDTH, vb)).unwrap();
    engine.set_optimizer(sgd()).unwrap();
    let runs = AtomicUsize::new(0);
    let output = layer.run(rows(0, 0), move |layer, rows| {
        let rows = rows.narrow(0, 0, 2 + runs.fetch_add(1, Relaxed))?;
        layer.forward(&rows)
    });
    let error = engine
        .backward(&mean_square(&output.unwrap()).unwrap(), true)
        .unwrap_err();
    assert!(
        error.to_string().contains("\"fickle\" came to other results"),
        "{error}"
    );
}

#[test]
fn a_tensor_that_a_forward_has_captured_is_an_error_that_names_the_part() {
    for strategy in [
        options(SHARDED, UnitPolicy::all()),
        options(DataParallel, UnitPolicy::all()),
    ] {
        let engine = engine(&sconce_collectives::single(), strategy);
        let vb = builder(&engine);
        let [first, second] =
            ["first", "second"].map(|name| unit(vb.clone(), name, |vb| linear(WIDTH, WIDTH, vb)).unwrap());
        let outside = weight(&vb, WIDTH, "outside").unwrap();
        engine.set_optimizer(sgd()).unwrap();
        let hidden = first.forward(&rows(0, 0)).unwrap();
        for captured in [hidden.clone(), outside] {
            let output = second.run(hidden.clone(), move |layer, hidden| {
                layer.forward(&hidden)?.broadcast_add(&captured)
            });
            let loss = mean_square(&output.unwrap()).unwrap();
            let error = loss.backward().unwrap_err().to_string();
            assert!(error.contains("\"second\" computes with a tensor"), "{error}");
        }
    }
}

#[test]
fn runs_leave_nothing_behind_when_their_graphs_go() {
    let engine = engine(&sconce_collectives::single(), options(DataParallel, UnitPolicy::all()));
    let marked = Arc::new(());
    let layer = unit(builder(&engine), "layer", |vb| linear(WIDTH, WIDTH, vb)).unwrap();
    engine.set_optimizer(sgd()).unwrap();
    let kept = Arc::clone(&marked);
    let output = layer.run(rows(0, 0), move |layer, rows| {
        let _ = &kept;
        layer.forward(&rows)
    });
    let loss = mean_square(&output.unwrap()).unwrap();
    assert_eq!(Arc::strong_count(&marked), 2);
    engine.backward(&loss, true).unwrap();
    assert!(flat(&loss)[0].is_finite());
    drop(loss);
    assert_eq!(Arc::strong_count(&marked), 1);
}
