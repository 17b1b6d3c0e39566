//! The global norm, and clipping by it.

use super::{add, buckets, deviation, engine, flat, gradient, linear_loss, mean, on_ranks, parameters, sgd, values};
use sconce_zero::EngineOptions;

const NAMES: [(&str, usize); 3] = [("a", 5), ("b", 1), ("c", 70_001)];

/// The gradient of parameter `number` on a rank.
fn of(number: usize, rank: usize) -> Vec<f32> {
    gradient(NAMES[number].1, 10 * number + rank)
}

/// Returns the mean of all ranks' gradients, all parameters joined in order of name.
fn expected(world: usize) -> Vec<f64> {
    (0..NAMES.len())
        .flat_map(|n| mean(&(0..world).map(|rank| of(n, rank)).collect::<Vec<_>>()))
        .collect()
}

fn l2(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>().sqrt()
}

#[test]
fn the_norm_is_that_of_all_mean_gradients_joined() {
    for world in 1..=4 {
        for first in [0, 1 << 20] {
            let norms = on_ranks(world, |communicator| {
                let engine = engine(&communicator, buckets(first, first));
                let [a, b, c] = parameters(&engine, NAMES);
                let losses = [(&a, 0), (&b, 1), (&c, 2)].map(|(p, n)| linear_loss(p, &of(n, communicator.rank())));
                let loss = add(add(losses[0].clone(), &losses[1]), &losses[2]);
                engine.backward(&loss, true).unwrap();
                engine.grad_norm().unwrap()
            });
            let expected = l2(&expected(world));
            for norm in &norms {
                assert!(
                    (norm / expected - 1.0).abs() < 1e-6,
                    "world {world}: {norm}, expected {expected}"
                );
                assert_eq!(norm.to_bits(), norms[0].to_bits());
            }
        }
    }
}

#[test]
fn clipping_scales_by_max_norm_over_norm_but_never_up() {
    for world in 1..=4 {
        let gradients = expected(world);
        let norm = l2(&gradients);
        for max_norm in [norm * 0.01, norm * 0.9, norm * 2.0, f64::INFINITY] {
            on_ranks(world, |communicator| {
                let engine = engine(&communicator, EngineOptions::default());
                let [a, b, c] = parameters(&engine, NAMES);
                engine.set_optimizer(sgd()).unwrap();
                let before = values(&engine);
                let losses = [(&a, 0), (&b, 1), (&c, 2)].map(|(p, n)| linear_loss(p, &of(n, communicator.rank())));
                engine
                    .backward(&add(add(losses[0].clone(), &losses[1]), &losses[2]), true)
                    .unwrap();
                let found = engine.clip_grad_norm(max_norm).unwrap();
                assert!((found / norm - 1.0).abs() < 1e-6);
                engine.step(1.0).unwrap();
                // torch.nn.utils.clip_grad_norm_: clamp(max_norm / (norm + 1e-6), max=1).
                let factor = (max_norm / (norm + 1e-6)).min(1.0);
                let expected: Vec<f64> = before
                    .iter()
                    .zip(&gradients)
                    .map(|(p, g)| f64::from(*p) - factor * g)
                    .collect();
                let deviation = deviation(&values(&engine), &expected);
                assert!(deviation < 1e-6, "world {world}, max_norm {max_norm}: {deviation}");
            });
        }
    }
}

/// An engine with one parameter of two elements.
fn pair() -> (sconce_zero::Engine, candle_core::Tensor) {
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    let [p] = parameters(&engine, [("p", 2)]);
    engine.set_optimizer(sgd()).unwrap();
    (engine, p)
}

/// Returns what SGD with a rate of 1 took off.
fn step(engine: &sconce_zero::Engine, p: &candle_core::Tensor) -> Vec<f32> {
    let before = flat(p);
    engine.step(1.0).unwrap();
    before
        .iter()
        .zip(flat(p))
        .map(|(before, after)| before - after)
        .collect()
}

fn assert_close(found: &[f32], expected: &[f32]) {
    let close = found
        .iter()
        .zip(expected)
        .all(|(f, e)| (f - e).abs() < 1e-5 * (1.0 + e.abs()));
    assert!(
        close && found.len() == expected.len(),
        "{found:?}, expected {expected:?}"
    );
}

#[test]
fn a_millionth_is_added_to_the_norm_before_dividing() {
    let (engine, p) = pair();
    engine.backward(&linear_loss(&p, &[3e-6, 4e-6]), true).unwrap();
    engine.clip_grad_norm(1e-6).unwrap();
    let before = flat(&p);
    // A rate of 1e6 makes the update large enough to be seen: 3 / (5 + 1) and 4 / (5 + 1).
    engine.step(1e6).unwrap();
    let taken_off: Vec<f32> = before
        .iter()
        .zip(flat(&p))
        .map(|(before, after)| before - after)
        .collect();
    assert_close(&taken_off, &[3.0 / 6.0, 4.0 / 6.0]);
}

#[test]
fn a_norm_that_is_not_a_number_shows_and_spoils_every_gradient_as_in_pytorch() {
    let (engine, p) = pair();
    engine.backward(&linear_loss(&p, &[f32::NAN, 1.0]), true).unwrap();
    assert!(engine.clip_grad_norm(1.0).unwrap().is_nan());
    engine.step(1.0).unwrap();
    assert!(flat(&p).iter().all(|value| value.is_nan()));
}

#[test]
fn an_infinite_norm_shows_and_clips_finite_gradients_to_zero_as_in_pytorch() {
    let (engine, p) = pair();
    let before = flat(&p);
    engine.backward(&linear_loss(&p, &[f32::INFINITY, 1.0]), true).unwrap();
    assert_eq!(engine.clip_grad_norm(1.0).unwrap(), f64::INFINITY);
    engine.step(1.0).unwrap();
    assert!(flat(&p)[0].is_nan());
    assert_eq!(flat(&p)[1], before[1]);
}

#[test]
fn clipped_gradients_stay_clipped_for_a_second_step() {
    let (engine, p) = pair();
    engine.backward(&linear_loss(&p, &[3.0, 4.0]), true).unwrap();
    engine.clip_grad_norm(1.0).unwrap();
    assert_close(&step(&engine, &p), &[0.6, 0.8]);
    assert_close(&step(&engine, &p), &[0.6, 0.8]);
}

#[test]
fn clipping_twice_clips_what_the_first_left() {
    let (engine, p) = pair();
    engine.backward(&linear_loss(&p, &[3.0, 4.0]), true).unwrap();
    engine.clip_grad_norm(1.0).unwrap();
    assert!((engine.clip_grad_norm(10.0).unwrap() - 1.0).abs() < 1e-5);
    assert!((engine.clip_grad_norm(0.5).unwrap() - 1.0).abs() < 1e-5);
    assert_close(&step(&engine, &p), &[0.3, 0.4]);
}

#[test]
fn a_clip_does_not_outlive_the_gradients_it_was_made_for() {
    let (engine, p) = pair();
    engine.backward(&linear_loss(&p, &[300.0, 400.0]), true).unwrap();
    engine.clip_grad_norm(1.0).unwrap();
    engine.zero_grad();
    engine.backward(&linear_loss(&p, &[3.0, 4.0]), true).unwrap();
    assert_close(&step(&engine, &p), &[3.0, 4.0]);
}

#[test]
fn gradients_that_come_after_a_clip_are_added_unclipped() {
    let (engine, p) = pair();
    engine.backward(&linear_loss(&p, &[3.0, 4.0]), true).unwrap();
    engine.clip_grad_norm(1.0).unwrap();
    engine.backward(&linear_loss(&p, &[1.0, 1.0]), true).unwrap();
    assert_close(&step(&engine, &p), &[1.6, 1.8]);
}
