//! Loss scaling in the training loop: skipped steps, and the schedule that waits for them.

use super::training::{dataset, loss, model, parameters};
use super::{bits, build, flat, on_ranks};
use candle_core::Tensor;
use candle_nn::ParamsAdamW;
use sconce_core::{
    AcceleratorBuilder, AdamW, BackoffScaling, CandleOptimizer, DataLoader, HysteresisScaling, LinearSchedule,
    LossScaling, ParameterGroups, ParameterSet, Schedule, Scheduler, ZeroStage,
};

const ROWS: usize = 24;
const TOGETHER: usize = 12;
const SCHEDULE: LinearSchedule = LinearSchedule {
    warmup_steps: 2,
    total_steps: 8,
};

/// What a rank saw: norms, the rate of every micro-batch, and the final parameters.
type Seen = (Vec<u64>, Vec<f64>, Vec<u32>);

/// Trains two epochs in windows of two micro-batches, with one window more before the second that overflows on rank
/// `overflow`, if any.
fn train(world: usize, overflow: Option<usize>, builder: impl Fn() -> AcceleratorBuilder + Sync) -> Vec<Seen> {
    on_ranks(world, |communicator| {
        let rank = communicator.rank();
        let acc = build(builder().communicator(communicator).gradient_accumulation_steps(2));
        let model = model(&*acc);
        let loader = DataLoader::new(dataset(ROWS).2, TOGETHER / 2 / world);
        let undecayed = AdamW {
            learning_rate: 0.1,
            weight_decay: 0.0,
            ..AdamW::default()
        };
        let decayed = AdamW {
            weight_decay: 0.3,
            ..undecayed.clone()
        };
        let rule = ParameterGroups::new(decayed).with(ParameterSet::norms_and_biases(), undecayed);
        let (mut optimizer, mut loader, mut scheduler) = acc.prepare(rule, loader, SCHEDULE).unwrap();
        let (mut norms, mut rates) = (Vec::new(), Vec::new());
        for epoch in 0..2 {
            if let Some(overflow) = overflow.filter(|_| epoch == 1) {
                let before = (bits(&parameters(&model)), optimizer.learning_rate());
                for micro in 0..2 {
                    acc.accumulate();
                    let (features, targets, _) = dataset(1);
                    let device = acc.device();
                    let x = Tensor::from_slice(&features[0], (1, 3), device).unwrap();
                    let y = Tensor::from_slice(&targets, (1, 1), device).unwrap();
                    let factor = if rank == overflow && micro == 0 {
                        f64::from(f32::MAX)
                    } else {
                        1.0
                    };
                    acc.backward(&(loss(&model, &[x, y]) * factor).unwrap()).unwrap();
                    assert!(!optimizer.step_was_skipped());
                    let norm = acc.clip_grad_norm(0.5).unwrap();
                    assert!(norm.is_none_or(|norm| !norm.is_finite()));
                    optimizer.step().unwrap();
                    scheduler.step().unwrap();
                    optimizer.zero_grad().unwrap();
                }
                assert!(optimizer.step_was_skipped());
                assert_eq!((optimizer.skipped_steps(), optimizer.loss_scale()), (1, 32768.0));
                assert_eq!((bits(&parameters(&model)), scheduler.learning_rate()), before);
            }
            for batch in &mut loader {
                acc.accumulate();
                acc.backward(&loss(&model, &batch.unwrap())).unwrap();
                norms.extend(acc.clip_grad_norm(0.5).unwrap().map(f64::to_bits));
                rates.push(optimizer.learning_rate());
                optimizer.step().unwrap();
                scheduler.step().unwrap();
                optimizer.zero_grad().unwrap();
                assert!(!optimizer.step_was_skipped() || !acc.sync_gradients());
            }
        }
        (norms, rates, bits(&parameters(&model)))
    })
}

#[test]
fn a_step_that_overflows_is_as_if_its_window_had_not_been_and_the_schedule_waits() {
    for world in 1..=3 {
        for strategy in [None, Some(ZeroStage::One), Some(ZeroStage::Two)] {
            let unscaled = || {
                let builder = AcceleratorBuilder::default();
                match strategy {
                    Some(strategy) => builder.strategy(strategy),
                    None => builder,
                }
            };
            let scaled = || unscaled().loss_scaling(LossScaling::Backoff(BackoffScaling::default()));
            let expected = train(world, None, unscaled);
            let rates: Vec<f64> = (0..8).map(|micro| SCHEDULE.learning_rate(0.1, micro / 2)).collect();
            for rank in &expected {
                assert_eq!((rank.0.len(), &rank.1), (4, &rates));
            }
            assert_eq!(train(world, None, scaled), expected, "world {world}, {strategy:?}");
            assert_eq!(
                train(world, Some(world - 1), scaled),
                expected,
                "world {world}, {strategy:?}"
            );
        }
    }
}

#[test]
fn deepspeeds_error_at_the_minimum_comes_out_of_the_step() {
    let scaling = LossScaling::Hysteresis(HysteresisScaling {
        initial_scale: 1.0,
        hysteresis: 1,
        ..HysteresisScaling::default()
    });
    on_ranks(2, |communicator| {
        let acc = build(
            AcceleratorBuilder::default()
                .communicator(communicator)
                .loss_scaling(scaling.clone()),
        );
        let model = model(&*acc);
        let mut optimizer = acc.prepare_optimizer(Box::new(AdamW::default())).unwrap();
        let broken = (flat_loss(&model) * f64::INFINITY).unwrap();
        acc.backward(&broken).unwrap();
        let error = optimizer.step().unwrap_err().to_string();
        assert!(error.contains("loss scale is at its minimum of 1"), "{error}");
    });
}

fn flat_loss(model: &candle_nn::Linear) -> Tensor {
    (model.weight().sum_all().unwrap() + model.bias().unwrap().sum_all().unwrap()).unwrap()
}

#[test]
fn a_candle_optimizer_trains_in_the_loop_and_follows_the_schedule() {
    let train = |world: usize, candle: bool| {
        on_ranks(world, |communicator| {
            let acc = build(
                AcceleratorBuilder::default()
                    .communicator(communicator)
                    .strategy(ZeroStage::Two),
            );
            let model = model(&*acc);
            let mut optimizer = if candle {
                let settings = ParamsAdamW {
                    lr: 0.1,
                    ..ParamsAdamW::default()
                };
                acc.prepare_candle_optimizer(CandleOptimizer::new::<candle_nn::AdamW>(settings))
                    .unwrap()
            } else {
                let rule = AdamW {
                    learning_rate: 0.1,
                    ..AdamW::default()
                };
                acc.prepare_optimizer(Box::new(rule)).unwrap()
            };
            let loader = DataLoader::new(dataset(ROWS).2, TOGETHER / world);
            let mut loader = acc.prepare_loader(loader).unwrap();
            let mut scheduler = Scheduler::new(SCHEDULE, &optimizer);
            let mut rates = Vec::new();
            for _ in 0..3 {
                for batch in &mut loader {
                    acc.backward(&loss(&model, &batch.unwrap())).unwrap();
                    rates.push(optimizer.learning_rate());
                    optimizer.step().unwrap();
                    scheduler.step().unwrap();
                    optimizer.zero_grad().unwrap();
                }
            }
            assert_eq!(
                rates,
                (0..6).map(|step| SCHEDULE.learning_rate(0.1, step)).collect::<Vec<_>>()
            );
            [flat(model.weight()), flat(model.bias().unwrap())].concat()
        })
    };
    for world in 1..=3 {
        let expected: Vec<f64> = train(world, false)[0].iter().map(|value| f64::from(*value)).collect();
        for found in train(world, true) {
            assert!(super::deviation(&found, &expected) < 2e-6, "world {world}");
        }
    }
}
