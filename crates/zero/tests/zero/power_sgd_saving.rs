//! What PowerSGD keeps between steps is saved and goes on: with the same bits on as many ranks, and with what training is
//! owed on others.

use super::power_sgd::{COLUMNS, ROWS, settings, target};
use super::saving::{Pieces, Saved, save, whole};
use super::{bits, on_ranks, sgd};
use candle_core::{DType, Device, Tensor};
use sconce_collectives::Communicator;
use sconce_zero::{Engine, EngineOptions, EngineState, PowerSgd, Weights, ZeroStage};
use std::sync::Arc;

/// An engine with a model that has a matrix, which is compressed, and a vector.
struct Run {
    engine: Engine,
    matrix: Tensor,
    vector: Tensor,
    target: Tensor,
}

impl Run {
    fn new(communicator: &Arc<dyn Communicator>, options: EngineOptions) -> Self {
        let engine = Engine::new(communicator.clone(), options).unwrap();
        let vb = engine
            .var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)
            .unwrap();
        let zero = candle_nn::Init::Const(0.0);
        let matrix = vb.get_with_hints((ROWS, COLUMNS), "matrix", zero).unwrap();
        let vector = vb.get_with_hints(5, "vector", zero).unwrap();
        engine.set_optimizer(sgd()).unwrap();
        let target = target(communicator.rank());
        Self {
            engine,
            matrix,
            vector,
            target,
        }
    }

    /// Trains on a loss whose gradient is `target`, whatever the parameters are; returns the matrix's bits after each step.
    fn train(&self, steps: usize) -> Vec<Vec<u32>> {
        let step = |_| {
            let product = (&self.matrix * &self.target).unwrap().sum_all().unwrap();
            let loss = (product + self.vector.sum_all().unwrap()).unwrap();
            self.engine.backward(&loss, true).unwrap();
            self.engine.step(1.0).unwrap();
            self.engine.zero_grad();
            bits(&super::flat(&self.matrix))
        };
        (0..steps).map(step).collect()
    }
}

fn compressed(power_sgd: &PowerSgd) -> EngineOptions {
    EngineOptions {
        power_sgd: Some(power_sgd.clone()),
        ..EngineOptions::default()
    }
}

/// Trains `before` steps, saves, and goes on for `after`; returns what was saved and the bits that came after.
fn run(world: usize, settings: &PowerSgd, before: usize, after: usize) -> (Saved, EngineState, Vec<Vec<u32>>) {
    let pieces = Pieces::default();
    let mut outcomes = on_ranks(world, |communicator| {
        let run = Run::new(&communicator, compressed(settings));
        run.train(before);
        (save(&run.engine, &pieces), run.train(after))
    });
    let (state, went_on) = outcomes.remove(0);
    assert!(outcomes.iter().all(|(other, _)| *other == state), "ranks know the same");
    (whole(pieces), state, went_on)
}

/// Goes on from what was saved; returns what is saved at once, what is saved at the end, and the bits in between.
fn resume(
    world: usize,
    settings: &PowerSgd,
    (saved, state): (&Saved, &EngineState),
    steps: usize,
) -> (Saved, Saved, Vec<Vec<u32>>) {
    let (first, last) = (Pieces::default(), Pieces::default());
    let mut outcomes = on_ranks(world, |communicator| {
        let run = Run::new(&communicator, compressed(settings));
        let missing = run.engine.restore_state(state, &mut saved.clone()).unwrap();
        assert!(missing.is_empty(), "{missing:?}");
        save(&run.engine, &first);
        let went_on = run.train(steps);
        save(&run.engine, &last);
        went_on
    });
    (whole(first), whole(last), outcomes.remove(0))
}

#[test]
fn as_many_ranks_go_on_with_the_bits_of_the_run_that_was_not_interrupted() {
    let cases = [
        settings(2),
        // Saved before compression begins.
        PowerSgd {
            start_iteration: 6,
            ..settings(2)
        },
        PowerSgd {
            warm_start: false,
            ..settings(1)
        },
        PowerSgd {
            use_error_feedback: false,
            ..settings(1)
        },
    ];
    for settings in cases {
        for world in 1..=3 {
            let (saved, state, went_on) = run(world, &settings, 4, 5);
            let (again, _, resumed) = resume(world, &settings, (&saved, &state), 5);
            assert_eq!(again, saved, "world {world}, {settings:?}");
            assert_eq!(resumed, went_on, "world {world}, {settings:?}");
            assert_eq!(state.power_sgd.as_ref().unwrap().iterations, 4);
        }
    }
}

/// Returns an array of the matrix.
fn values(saved: &Saved, what: &str) -> Vec<f64> {
    let bits = &saved.arrays[&("matrix".into(), what.into())];
    bits.iter().map(|bits| f64::from(f32::from_bits(*bits))).collect()
}

/// Returns the mean of what so many ranks owe.
fn owed(saved: &Saved, world: usize) -> Vec<f64> {
    let errors = Vec::from_iter((0..world).map(|rank| values(saved, &format!("power_sgd_error.{rank}"))));
    assert!(
        !saved
            .arrays
            .contains_key(&("matrix".into(), format!("power_sgd_error.{world}")))
    );
    let sum = |i: usize| errors.iter().map(|error| error[i]).sum::<f64>();
    (0..errors[0].len()).map(|i| sum(i) / world as f64).collect()
}

fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |most, value| most.max(value.abs()))
}

#[test]
fn on_other_numbers_of_ranks_what_training_is_owed_is_conserved() {
    let (before, after) = (4, 7);
    for (from, to) in [(2, 3), (3, 2), (1, 4), (4, 1)] {
        let (saved, state, _) = run(from, &settings(2), before, 0);
        let (again, last, _) = resume(to, &settings(2), (&saved, &state), after);
        let (owed_before, owed_after) = (owed(&saved, from), owed(&again, to));
        let far = largest(owed_before.iter().zip(&owed_after).map(|(a, b)| a - b));
        assert!(
            largest(owed_before.iter().copied()) > 0.1,
            "thin factors leave something out"
        );
        assert!(far < 1e-6, "{from} to {to}: {far}");
        assert_eq!(values(&again, "power_sgd_q"), values(&saved, "power_sgd_q"));
        // All that was applied and is still owed is the sum of the mean gradients: nothing is lost, or comes twice.
        let mean = |world: usize, i: usize| {
            let of_rank = |rank: usize| f64::from(super::flat(&target(rank))[i]);
            (0..world).map(of_rank).sum::<f64>() / world as f64
        };
        let value = values(&last, "value");
        let owed = owed(&last, to);
        let far = largest((0..value.len()).map(|i| {
            let gradients = before as f64 * mean(from, i) + after as f64 * mean(to, i);
            gradients - (owed[i] - value[i])
        }));
        assert!(far < 1e-5, "{from} to {to}: {far}");
    }
}

#[test]
fn what_compression_kept_is_left_out_where_it_does_not_serve() {
    let (saved, state, _) = run(2, &settings(2), 4, 0);
    // Another rank of the matrices begins with Q as at first, and with what is owed.
    let (again, _, _) = resume(2, &settings(3), (&saved, &state), 1);
    assert!(!again.arrays.contains_key(&("matrix".into(), "power_sgd_q".into())));
    assert_eq!(owed(&again, 2), owed(&saved, 2));
    // Other strategies go on without compression, and save nothing of it.
    let pieces = Pieces::default();
    on_ranks(2, |communicator| {
        let options = EngineOptions {
            strategy: Box::new(ZeroStage::Two),
            ..EngineOptions::default()
        };
        let run = Run::new(&communicator, options);
        let missing = run.engine.restore_state(&state, &mut saved.clone()).unwrap();
        assert!(missing.is_empty(), "{missing:?}");
        assert_eq!(save(&run.engine, &pieces).power_sgd, None);
    });
    let kept = whole(pieces);
    assert_eq!(values(&kept, "value"), values(&saved, "value"));
    assert!(
        kept.arrays.keys().all(|(_, what)| what == "value"),
        "{:?}",
        kept.arrays.keys()
    );
    // What is not there is named.
    let mut without = saved.clone();
    without.arrays.remove(&("matrix".into(), "power_sgd_error.1".into()));
    on_ranks(3, |communicator| {
        let run = Run::new(&communicator, compressed(&settings(2)));
        let missing = run.engine.restore_state(&state, &mut without.clone()).unwrap();
        assert_eq!(missing, ["matrix (power_sgd_error.1)"]);
    });
}
