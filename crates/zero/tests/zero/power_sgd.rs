//! Gradients sent as thin factors: exact where they have as many columns, and made up for by error feedback where not.

use super::{on_ranks, sgd};
use candle_core::{DType, Device, Tensor};
use sconce_collectives::single;
use sconce_zero::{
    BackoffScaling, DataParallel, Engine, EngineOptions, LossScaling, PowerSgd, ShardingStrategy, Stepped, Weights,
    ZeroStage,
};

pub(super) const ROWS: usize = 12;
pub(super) const COLUMNS: usize = 9;

/// What a rank's gradient is in every step: of full rank, and another on every rank.
pub(super) fn target(rank: usize) -> Tensor {
    let value = |i: usize| (((i * 7 + rank * 31) % 23) as f32 * 0.37).sin();
    Tensor::from_vec(
        (0..ROWS * COLUMNS).map(value).collect::<Vec<_>>(),
        (ROWS, COLUMNS),
        &Device::Cpu,
    )
    .unwrap()
}

/// Steps of SGD at a rate of 1 on a loss whose gradient is `target`; returns minus the sum of all gradients applied, and
/// the elements sent.
fn applied(world: usize, steps: usize, power_sgd: PowerSgd) -> (Vec<f32>, u64) {
    applied_with(world, steps, power_sgd, None, None)
}

/// Does so with a loss scale, and one more step, before this one, in which the last rank's loss is infinite.
fn applied_with(
    world: usize,
    steps: usize,
    power_sgd: PowerSgd,
    loss_scaling: Option<LossScaling>,
    overflow: Option<usize>,
) -> (Vec<f32>, u64) {
    let outcomes = on_ranks(world, |communicator| {
        let options = EngineOptions {
            power_sgd: Some(power_sgd.clone()),
            loss_scaling: loss_scaling.clone(),
            ..EngineOptions::default()
        };
        let engine = Engine::new(communicator.clone(), options).unwrap();
        let vb = engine
            .var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)
            .unwrap();
        let zero = candle_nn::Init::Const(0.0);
        let matrix = vb.get_with_hints((ROWS, COLUMNS), "matrix", zero).unwrap();
        let vector = vb.get_with_hints(5, "vector", zero).unwrap();
        engine.set_optimizer(sgd()).unwrap();
        let target = target(communicator.rank());
        let before = sent(&engine);
        for step in 0..steps {
            let loss = ((&matrix * &target).unwrap().sum_all().unwrap() + vector.sum_all().unwrap()).unwrap();
            if overflow == Some(step) {
                let factor = if communicator.rank() + 1 == world {
                    f64::INFINITY
                } else {
                    1.0
                };
                engine.backward(&(&loss * factor).unwrap(), true).unwrap();
                assert_eq!(engine.step(1.0).unwrap(), Stepped::Skipped);
                engine.zero_grad();
            }
            engine.backward(&loss, true).unwrap();
            engine.step(1.0).unwrap();
            engine.zero_grad();
        }
        assert!(
            vector
                .to_vec1::<f32>()
                .unwrap()
                .iter()
                .all(|value| *value == -(steps as f32))
        );
        (
            matrix.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
            sent(&engine) - before,
        )
    });
    assert!(
        outcomes.iter().all(|outcome| outcome == &outcomes[0]),
        "replicas are equal"
    );
    outcomes[0].clone()
}

fn sent(engine: &Engine) -> u64 {
    engine.traffic().iter().map(|traffic| traffic.elements).sum()
}

/// Returns the largest difference to `steps` times the mean of all ranks' gradients, over the largest element of that.
fn relative_deviation(found: &[f32], world: usize, steps: usize) -> f32 {
    let mean = |i: usize| {
        let of_rank = |rank: usize| target(rank).flatten_all().unwrap().to_vec1::<f32>().unwrap()[i];
        (0..world).map(of_rank).sum::<f32>() / world as f32
    };
    let means = Vec::from_iter((0..found.len()).map(mean));
    let largest = means.iter().fold(0f32, |most, mean| most.max(mean.abs()));
    let pairs = found.iter().zip(&means);
    let far = pairs.map(|(found, mean)| (found / steps as f32 + mean).abs());
    far.fold(0.0, f32::max) / largest
}

pub(super) fn settings(matrix_rank: usize) -> PowerSgd {
    PowerSgd {
        matrix_rank,
        start_iteration: 0,
        min_compression_rate: 0.1,
        ..PowerSgd::default()
    }
}

#[test]
fn factors_of_full_rank_are_the_mean_itself() {
    for world in 1..=4 {
        let (found, _) = applied(world, 1, settings(COLUMNS));
        let far = relative_deviation(&found, world, 1);
        assert!(far < 1e-5, "world {world}: {far:.1e}");
    }
}

#[test]
fn error_feedback_makes_up_for_what_thin_factors_leave_out() {
    for world in 1..=3 {
        let far = |steps| relative_deviation(&applied(world, steps, settings(2)).0, world, steps);
        // What is left out stays bounded while the sum grows.
        let (few, many) = (far(4), far(64));
        assert!(
            few > 0.02 && many < few / 4.0,
            "world {world}: {few} after 4 steps, {many} after 64"
        );
        let without = PowerSgd {
            use_error_feedback: false,
            ..settings(2)
        };
        let never = relative_deviation(&applied(world, 64, without).0, world, 64);
        assert!(never > 2.0 * many, "world {world}: {never} without, {many} with");
    }
}

#[test]
fn a_step_that_overflows_leaves_what_is_owed_and_a_loss_scale_changes_nothing_of_it() {
    for world in 1..=3 {
        let plain = applied(world, 16, settings(2)).0;
        let scaling = || Some(LossScaling::Static(1024.0));
        let scaled = applied_with(world, 16, settings(2), scaling(), None).0;
        // Powers of two leave all bits as they are.
        assert_eq!(scaled, plain, "world {world}");
        // The scale doubles every other step, and halves at the overflow.
        let backs_off = LossScaling::Backoff(BackoffScaling {
            growth_interval: 2,
            ..BackoffScaling::default()
        });
        let found = applied_with(world, 16, settings(2), Some(backs_off), Some(5)).0;
        let (far, expected) = (
            relative_deviation(&found, world, 16),
            relative_deviation(&plain, world, 16),
        );
        assert!(
            far < 1.5 * expected + 1e-6,
            "world {world}: {far}, without an overflow {expected}"
        );
    }
}

#[test]
fn less_is_sent_from_the_iteration_on_at_which_compression_begins() {
    let per_step = |settings: PowerSgd| applied(2, 6, settings).1;
    let plain = per_step(PowerSgd {
        start_iteration: 6,
        ..settings(1)
    });
    let compressed = per_step(settings(1));
    let half = per_step(PowerSgd {
        start_iteration: 3,
        ..settings(1)
    });
    assert!(compressed < plain / 2, "{compressed} of {plain}");
    assert_eq!(half * 2, plain + compressed);
    // 21 columns and rows of 108 elements: not 6 times smaller.
    let too_little = PowerSgd {
        min_compression_rate: 6.0,
        ..settings(1)
    };
    let (exact, _) = applied(2, 1, too_little);
    assert!(relative_deviation(&exact, 2, 1) < 1e-6);
}

#[test]
fn plain_gradients_come_to_the_same_bits_before_compression_begins() {
    let later = PowerSgd::default();
    let (found, _) = applied(3, 2, later);
    assert!(relative_deviation(&found, 3, 2) < 1e-6);
}

#[test]
fn sharded_gradients_and_bad_settings_are_refused() {
    let refused = |strategy: Box<dyn ShardingStrategy>, power_sgd: PowerSgd| {
        let options = EngineOptions {
            strategy,
            power_sgd: Some(power_sgd),
            ..EngineOptions::default()
        };
        let engine = Engine::new(single(), options)?;
        let vb = engine.var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)?;
        let weight = vb.get((4, 4), "weight")?;
        engine.set_optimizer(sgd())?;
        engine.backward(&weight.sum_all()?, true)
    };
    for (strategy, settings, part) in [
        (
            Box::new(ZeroStage::Two) as Box<dyn ShardingStrategy>,
            settings(1),
            "data parallelism",
        ),
        (
            Box::new(DataParallel),
            PowerSgd {
                matrix_rank: 0,
                ..settings(1)
            },
            "at least 1 column",
        ),
        (
            Box::new(DataParallel),
            PowerSgd {
                min_compression_rate: f64::NAN,
                ..settings(1)
            },
            "a number above 0",
        ),
    ] {
        let text = refused(strategy, settings).unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
    }
}
