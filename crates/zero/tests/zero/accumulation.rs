//! Several backwards before one step.

use super::{
    add, bits, buckets, deviation, engine, flat, gradient, linear_loss, mean, on_ranks, parameters, sgd, values,
};
use sconce_zero::{Engine, EngineOptions};

const NAMES: [(&str, usize); 2] = [("a", 33), ("b", 70_001)];

fn of(number: usize, rank: usize, micro_batch: usize) -> Vec<f32> {
    gradient(NAMES[number].1, 100 * number + 10 * rank + micro_batch)
}

/// Runs backwards with these `synchronise` flags, then one step; returns the values before and after.
fn run(world: usize, first_bucket: usize, flags: [bool; 3]) -> Vec<(Vec<f32>, Vec<f32>)> {
    on_ranks(world, |communicator| {
        let engine = engine(&communicator, buckets(first_bucket, first_bucket));
        let [a, b] = parameters(&engine, NAMES);
        engine.set_optimizer(sgd()).unwrap();
        let before = values(&engine);
        for (micro_batch, synchronise) in flags.into_iter().enumerate() {
            let loss = |p, number| linear_loss(p, &of(number, communicator.rank(), micro_batch));
            engine.backward(&add(loss(&a, 0), &loss(&b, 1)), synchronise).unwrap();
        }
        engine.step(1.0).unwrap();
        (before, values(&engine))
    })
}

#[test]
fn three_backwards_equal_one_of_the_summed_loss_whenever_they_synchronise() {
    for world in 1..=4 {
        let total = |number: usize| -> Vec<f64> {
            let means = (0..3).map(|m| mean(&(0..world).map(|rank| of(number, rank, m)).collect::<Vec<_>>()));
            means
                .reduce(|sum, one| sum.iter().zip(one).map(|(a, b)| a + b).collect())
                .unwrap()
        };
        let total: Vec<f64> = (0..2).flat_map(total).collect();
        for flags in [[false, false, true], [true, true, true], [true, false, true]] {
            for bucket in [0, 1 << 20] {
                let ranks = run(world, bucket, flags);
                for (before, after) in &ranks {
                    let expected: Vec<f64> = before.iter().zip(&total).map(|(p, g)| f64::from(*p) - g).collect();
                    let found = deviation(after, &expected);
                    assert!(found < 1e-6, "world {world}, {flags:?}: {found}");
                    assert_eq!(bits(after), bits(&ranks[0].1), "world {world}, {flags:?}");
                }
            }
        }
    }
}

fn one() -> (Engine, candle_core::Tensor) {
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    let [p] = parameters(&engine, [("p", 2)]);
    engine.set_optimizer(sgd()).unwrap();
    (engine, p)
}

#[test]
fn gradients_stay_for_a_second_step_until_they_are_zeroed() {
    let (engine, p) = one();
    let before = flat(&p);
    engine.backward(&linear_loss(&p, &[1.0, -2.0]), true).unwrap();
    engine.step(1.0).unwrap();
    engine.step(1.0).unwrap();
    assert_eq!(flat(&p), [before[0] - 1.0 - 1.0, before[1] + 2.0 + 2.0]);
    engine.zero_grad();
    assert_eq!(engine.grad_norm().unwrap(), 0.0);
    engine.backward(&linear_loss(&p, &[4.0, 3.0]), true).unwrap();
    assert_eq!(engine.grad_norm().unwrap(), 5.0);
}

#[test]
fn a_step_without_gradients_is_an_error() {
    let (engine, p) = one();
    let error = engine.step(1.0).unwrap_err().to_string();
    assert!(error.contains("backward"), "{error}");
    engine.backward(&linear_loss(&p, &[1.0, 1.0]), true).unwrap();
    engine.zero_grad();
    let error = engine.step(1.0).unwrap_err().to_string();
    assert!(error.contains("zero_grad"), "{error}");
}

#[test]
fn a_step_on_gradients_that_ranks_did_not_exchange_is_an_error() {
    for world in 1..=2 {
        on_ranks(world, |communicator| {
            let engine = engine(&communicator, EngineOptions::default());
            let [p] = parameters(&engine, [("p", 2)]);
            engine.set_optimizer(sgd()).unwrap();
            engine.backward(&linear_loss(&p, &[1.0, 1.0]), true).unwrap();
            engine.backward(&linear_loss(&p, &[1.0, 1.0]), false).unwrap();
            let error = engine.step(1.0).unwrap_err().to_string();
            assert!(error.contains("synchronise"), "{error}");
        });
    }
}
