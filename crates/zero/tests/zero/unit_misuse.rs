//! What can be done wrong with units and sharded parameters: an error that says what, soon, and on every rank.

use super::misuse::assert_says;
use super::parity::{Case, SHARDED, WIDTH, builder, mean_square, rows, weight};
use super::{engine, flat, on_ranks, sgd};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Linear, linear};
use sconce_collectives::Communicator;
use sconce_zero::{Engine, EngineOptions, Error, Unit, Weights, unit};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn sharded(communicator: &Arc<dyn Communicator>) -> Engine {
    let options = EngineOptions {
        strategy: Box::new(SHARDED),
        ..EngineOptions::default()
    };
    engine(communicator, options)
}

/// Two equal layers, ready for training.
fn layers(engine: &Engine) -> [Unit<Linear>; 2] {
    let vb = builder(engine);
    let layer = |name: &str| unit(vb.clone(), name, |vb| linear(WIDTH, WIDTH, vb)).unwrap();
    let layers = [layer("encoder"), layer("decoder")];
    engine.set_optimizer(sgd()).unwrap();
    layers
}

fn train(engine: &Engine, layers: &[Unit<Linear>; 2]) -> Tensor {
    let hidden = layers[0]
        .forward(&rows(0, engine.communicator().rank()))
        .unwrap()
        .tanh()
        .unwrap();
    let loss = mean_square(&layers[1].forward(&hidden).unwrap()).unwrap();
    engine.backward(&loss, true).unwrap();
    engine.step(0.1).unwrap();
    engine.zero_grad();
    loss
}

#[test]
fn ranks_that_draw_their_shares_from_other_seeds_are_told_both() {
    let errors = on_ranks(3, |communicator| {
        let engine = sharded(&communicator);
        let seed = if communicator.rank() == 2 { 8 } else { 7 };
        let vb = engine
            .var_builder(Weights::Random { seed }, DType::F32, &Device::Cpu)
            .unwrap();
        unit(vb, "layer", |vb| linear(WIDTH, WIDTH, vb)).unwrap();
        engine.set_optimizer(sgd()).unwrap_err()
    });
    for error in errors {
        assert!(matches!(error, Error::DifferentModels { rank: 2, .. }), "{error}");
        assert!(
            error.to_string().contains("from seed 7") && error.to_string().contains("from seed 8"),
            "{error}"
        );
    }
}

#[test]
fn ranks_that_run_units_in_another_order_are_told_both_names() {
    for world in [2, 3] {
        let errors = on_ranks(world, |communicator| {
            let engine = sharded(&communicator);
            let [encoder, decoder] = layers(&engine);
            let first = if communicator.rank() + 1 == world {
                decoder
            } else {
                encoder
            };
            let start = Instant::now();
            let error = first.forward(&rows(0, 0)).unwrap_err().to_string();
            (error, start.elapsed())
        });
        for (error, elapsed) in errors {
            for part in ["\"encoder\"", "\"decoder\"", "rank 0", "same order"] {
                assert!(error.contains(part), "{part} in {error}");
            }
            assert!(elapsed < Duration::from_secs(5), "{elapsed:?}");
        }
    }
}

#[test]
fn a_unit_that_only_some_ranks_run_is_an_error_on_all_and_no_hang() {
    for find_unused_parameters in [false, true] {
        let errors = on_ranks(3, |communicator| {
            let options = EngineOptions {
                strategy: Box::new(SHARDED),
                find_unused_parameters,
                ..EngineOptions::default()
            };
            let engine = engine(&communicator, options);
            let [encoder, decoder] = layers(&engine);
            let mut hidden = encoder.forward(&rows(0, 0)).unwrap();
            if communicator.rank() != 1 {
                hidden = match decoder.forward(&hidden) {
                    Ok(hidden) => hidden,
                    Err(error) => return error.to_string(),
                };
            }
            let loss = mean_square(&hidden).unwrap();
            engine.backward(&loss, true).unwrap_err().to_string()
        });
        let is_said = |error: &String| error.contains("decoder") || error.contains("different operations");
        assert!(errors.iter().all(is_said), "{errors:?}");
    }
}

#[test]
fn a_rank_that_goes_away_is_an_error_on_the_others() {
    let errors = on_ranks(3, |communicator| {
        let engine = sharded(&communicator);
        let layers = layers(&engine);
        train(&engine, &layers);
        let mut hidden = layers[0].forward(&rows(0, 0)).unwrap();
        if communicator.rank() == 2 {
            return None;
        }
        let start = Instant::now();
        for _ in 0..100 {
            match layers[1].forward(&hidden) {
                Ok(output) => hidden = output,
                Err(error) => return Some((error.to_string(), start.elapsed())),
            }
        }
        panic!("a rank is gone, and nobody noticed");
    });
    for (error, elapsed) in errors.into_iter().flatten() {
        assert!(error.contains("rank 2"), "{error}");
        assert!(elapsed < Duration::from_secs(20), "{elapsed:?}");
    }
}

/// Counts warnings that say where a loss may come from that is no number.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicUsize>, Arc<Mutex<String>>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _span: &tracing::span::Id, _values: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _span: &tracing::span::Id, _follows: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        struct Text<'a>(&'a mut String);
        impl tracing::field::Visit for Text<'_> {
            fn record_debug(&mut self, _field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                *self.0 += &format!("{value:?}");
            }
        }
        self.0.fetch_add(1, Ordering::SeqCst);
        event.record(&mut Text(&mut self.1.lock().unwrap()));
    }

    fn enter(&self, _span: &tracing::span::Id) {}

    fn exit(&self, _span: &tracing::span::Id) {}
}

#[test]
fn a_parameter_used_outside_of_its_unit_is_no_number_and_the_log_says_once_what_it_may_be() {
    on_ranks(2, |communicator| {
        let engine = sharded(&communicator);
        let layers = layers(&engine);
        let warnings = Warnings::default();
        tracing::subscriber::with_default(warnings.clone(), || {
            train(&engine, &layers);
            assert_eq!(warnings.0.load(Ordering::SeqCst), 0);
            for _ in 0..2 {
                let outside = layers[0].module().forward(&rows(0, 0)).unwrap();
                let loss = mean_square(&layers[1].forward(&outside).unwrap()).unwrap();
                assert!(flat(&loss)[0].is_nan());
                engine.backward(&loss, true).unwrap();
            }
        });
        assert_eq!(warnings.0.load(Ordering::SeqCst), 1);
        let text = warnings.1.lock().unwrap();
        assert!(text.contains("outside of its unit's forward"), "{text}");
    });
}

#[test]
fn a_step_within_a_units_forward_is_refused_and_possible_afterwards() {
    on_ranks(2, |communicator| {
        let engine = sharded(&communicator);
        let layers = layers(&engine);
        let loss = mean_square(&layers[1].forward(&layers[0].forward(&rows(0, 0)).unwrap()).unwrap()).unwrap();
        engine.backward(&loss, true).unwrap();
        let input = rows(0, 0);
        let output = layers[0].run_once(input, |layer, rows| {
            assert_says(
                engine.step(0.1),
                &["while a unit computes", "outside of the model's forward"],
            );
            let edit = engine.edit(&sconce_zero::ParameterSet::none(), 0, |_| Ok(()));
            assert!(matches!(edit, Err(Error::Order { .. })));
            layer.forward(&rows)
        });
        assert!(flat(&output.unwrap()).iter().all(|value| value.is_finite()));
        engine.step(0.1).unwrap();
        assert_eq!(engine.memory().gathered, 0);
    });
}

#[test]
fn an_error_within_a_units_forward_leaves_no_trace() {
    let run = |fails: bool| {
        on_ranks(2, |communicator| {
            let engine = sharded(&communicator);
            let layers = layers(&engine);
            let mut losses = Vec::new();
            for step in 0..4 {
                if fails && step != 1 {
                    layers[0].forward(&rows(0, 0)).unwrap();
                    assert_says(layers[1].forward(&rows(0, 0).t().unwrap()), &["shape mismatch"]);
                    let nested = layers[0].run_once(rows(0, 0), |_, rows| layers[1].forward(&rows.t()?));
                    assert_says(nested, &["shape mismatch"]);
                }
                losses.extend(flat(&train(&engine, &layers)));
                assert_eq!(engine.memory().gathered, 0);
            }
            losses
        })
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn a_unit_that_cannot_be_built_says_why_and_can_be_built_again() {
    on_ranks(2, |communicator| {
        let engine = sharded(&communicator);
        let vb = builder(&engine);
        let fail = |vb: candle_nn::VarBuilder<'_>| -> candle_core::Result<Unit<Linear>> {
            linear(WIDTH, WIDTH, vb.clone())?;
            unit(vb, "inner", |vb| {
                weight(&vb, 3, "a")?;
                candle_core::bail!("no such head")
            })
        };
        let outcome = unit(vb.clone(), "encoder", fail);
        assert_says(outcome.map(drop), &["no such head"]);
        // The parameters of the failed one are there; the unit built anew takes them over.
        let encoder = unit(vb.clone(), "encoder", |vb| linear(WIDTH, WIDTH, vb)).unwrap();
        let inner = unit(vb, "encoder.inner", |vb| weight(&vb, 3, "a")).unwrap();
        engine.set_optimizer(sgd()).unwrap();
        let output = encoder.forward(&rows(0, 0)).unwrap();
        let sum = inner.run(Vec::new(), |a, _: Vec<Tensor>| a.sum_all()).unwrap();
        let loss = (mean_square(&output).unwrap() + sum).unwrap();
        assert!(flat(&loss)[0].is_finite());
        engine.backward(&loss, true).unwrap();
        engine.step(0.1).unwrap();
    });
}

#[test]
fn a_sharded_parameter_is_not_handed_out_outside_of_units() {
    let engine = sharded(&sconce_collectives::single());
    let vb = builder(&engine);
    unit(vb.clone(), "embedding", |vb| weight(&vb, (WIDTH, 3), "weight")).unwrap();
    assert_says(
        weight(&vb, (WIDTH, 3), "embedding.weight"),
        &["\"embedding.weight\"", "outside of any"],
    );
}

#[test]
fn a_parameter_made_outside_of_units_first_stays_whole_for_both_uses() {
    Case::new(
        |vb| {
            let outside = weight(&vb, (WIDTH, WIDTH), "tied.weight")?;
            let inside = unit(vb.clone(), "tied", |vb| {
                Ok((weight(&vb, (WIDTH, WIDTH), "weight")?, weight(&vb, WIDTH, "own")?))
            });
            Ok((outside, inside?))
        },
        |(outside, inside), rows| {
            let hidden = rows.matmul(outside)?.tanh()?;
            let output = inside.run(hidden, |(tied, own), hidden| hidden.matmul(tied)?.broadcast_mul(own));
            mean_square(&output?)
        },
    )
    .check();
}

#[test]
fn a_model_is_not_run_while_one_of_its_units_is_being_built() {
    let engine = sharded(&sconce_collectives::single());
    let vb = builder(&engine);
    let outcome = unit(vb.clone(), "outer", |vb| {
        let inner = unit(vb, "inner", |vb| linear(WIDTH, 3, vb))?;
        inner.forward(&rows(0, 0))
    });
    assert_says(outcome.map(drop), &["being built", "build the whole model first"]);
    let inner = unit(vb, "outer.inner", |vb| linear(WIDTH, 3, vb)).unwrap();
    inner.forward(&rows(0, 0)).unwrap();
}
