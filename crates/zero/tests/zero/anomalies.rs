//! Losses and gradients that are not finite, where they are looked for.

use super::misuse::assert_says;
use super::{engine, on_ranks, parameters, sgd};
use candle_core::Tensor;
use sconce_collectives::{Communicator, single};
use sconce_zero::{Anomaly, Engine, EngineOptions, LossScaling, Stepped, ZeroStage};
use std::sync::Arc;

fn watched(communicator: &Arc<dyn Communicator>, options: EngineOptions) -> (Engine, [Tensor; 4]) {
    let options = EngineOptions {
        detect_anomaly: true,
        ..options
    };
    let engine = engine(communicator, options);
    let tensors = parameters(&engine, [("early", 3), ("middle", 3), ("late", 3), ("last", 2)]);
    engine.set_optimizer(sgd()).unwrap();
    (engine, tensors)
}

/// A chain of parameters; with `is_broken` the derivative of a root of zero stands between `middle` and `late`.
fn loss([early, middle, late, last]: &[Tensor; 4], is_broken: bool) -> Tensor {
    let hidden = (early * middle).unwrap();
    let hidden = if is_broken {
        (&hidden * hidden.zeros_like().unwrap()).unwrap().sqrt().unwrap()
    } else {
        hidden
    };
    let loss = (hidden * late).unwrap().sum_all().unwrap();
    (loss + last.sum_all().unwrap()).unwrap()
}

#[test]
fn the_first_parameter_whose_gradient_is_not_finite_is_named_in_the_order_of_the_backward() {
    let (engine, tensors) = watched(&single(), EngineOptions::default());
    engine.backward(&loss(&tensors, false), true).unwrap();
    assert_eq!(engine.last_anomaly(), None);
    engine.zero_grad();
    assert_says(
        engine.backward(&loss(&tensors, true), true),
        &[
            "\"middle\" is the first that is not finite",
            "3 NaN and 0 infinite of 3 elements",
            "that of \"late\"",
        ],
    );
    // Without the switch the same backward says nothing.
    let unwatched = super::engine(&single(), EngineOptions::default());
    let tensors = parameters(&unwatched, [("early", 3), ("middle", 3), ("late", 3), ("last", 2)]);
    unwatched.backward(&loss(&tensors, true), true).unwrap();
    assert_eq!(unwatched.last_anomaly(), None);
    assert!(unwatched.grad_norm().unwrap().is_nan());
}

#[test]
fn a_loss_that_is_not_finite_is_told_as_such() {
    for (factor, text) in [(f64::NAN, "the loss is NaN"), (f64::INFINITY, "the loss is inf")] {
        let (engine, tensors) = watched(&single(), EngineOptions::default());
        let broken = (loss(&tensors, false).abs().unwrap() * factor).unwrap();
        assert_says(engine.backward(&broken, true), &[text, "forward"]);
    }
}

#[test]
fn one_ranks_anomaly_ends_all_ranks_with_the_name() {
    for strategy in [ZeroStage::One, ZeroStage::Two] {
        let texts = on_ranks(3, |communicator| {
            let rank = communicator.rank();
            let options = EngineOptions {
                strategy: Box::new(strategy),
                ..EngineOptions::default()
            };
            let (engine, tensors) = watched(&communicator, options);
            engine
                .backward(&loss(&tensors, rank == 1), true)
                .unwrap_err()
                .to_string()
        });
        for (rank, text) in texts.iter().enumerate() {
            assert!(text.contains("\"middle\" is the first"), "rank {rank}: {text}");
        }
    }
}

#[test]
fn where_steps_that_overflow_are_skipped_an_anomaly_is_noted_and_training_goes_on() {
    let options = EngineOptions {
        loss_scaling: Some(LossScaling::Static(4.0)),
        ..EngineOptions::default()
    };
    let (engine, tensors) = watched(&single(), options);
    engine.backward(&loss(&tensors, true), true).unwrap();
    let expected = Anomaly {
        parameter: "middle".into(),
        nan: 3,
        infinite: 0,
        elements: 3,
        before: Some("late".into()),
    };
    assert_eq!(engine.last_anomaly(), Some(expected));
    assert_eq!(engine.step(1.0).unwrap(), Stepped::Skipped);
    engine.backward(&loss(&tensors, false), true).unwrap();
    assert_eq!(engine.last_anomaly(), None);
    assert_eq!(engine.step(1.0).unwrap(), Stepped::Updated);
}
