//! Schedules, against transformers' traces.

use super::training::{dataset, loss, model};
use super::{accelerator, build, fixture, on_ranks};
use sconce_collectives::single;
use sconce_core::schedule::{ConstantSchedule, LambdaSchedule, OneCycleLr};
use sconce_core::{
    AcceleratorBuilder, DataLoader, LinearSchedule, LossScaling, Schedule, ScheduleAdvance, Scheduler, Sgd, Weights,
};

#[test]
fn the_linear_schedule_follows_transformers_step_by_step() {
    let table = fixture("learning_rates.json");
    let cases = table["cases"].as_array().unwrap();
    let cases = cases.iter().filter(|case| case["name"] == "linear");
    assert_eq!(cases.clone().count(), 3);
    for case in cases {
        let number = |name: &str| case["args"][name].as_u64().unwrap();
        let schedule = LinearSchedule {
            warmup_steps: number("num_warmup_steps"),
            total_steps: number("num_training_steps"),
        };
        let base = case["base_lr"].as_f64().unwrap();
        let acc = accelerator(single());
        candle_nn::linear(2, 1, acc.var_builder(Weights::Random { seed: 0 }).unwrap()).unwrap();
        let rule = Sgd {
            learning_rate: base,
            ..Sgd::default()
        };
        let optimizer = acc.prepare_optimizer(Box::new(rule)).unwrap();
        let mut scheduler = Scheduler::new(schedule, &optimizer);
        for (step, rate) in case["lr"].as_array().unwrap().iter().enumerate() {
            let rate = rate.as_f64().unwrap();
            for found in [
                scheduler.learning_rate(),
                optimizer.learning_rate(),
                schedule.learning_rate(base, step as u64),
            ] {
                assert!((found - rate).abs() <= 1e-12 * rate, "{case}, step {step}: {found}");
            }
            scheduler.step().unwrap();
        }
    }
}

#[test]
fn a_linear_schedule_of_nothing_gives_finite_rates() {
    for (warmup_steps, total_steps) in [(0, 0), (5, 5), (7, 3)] {
        let schedule = LinearSchedule {
            warmup_steps,
            total_steps,
        };
        for step in 0..10 {
            let rate = schedule.learning_rate(2.0, step);
            assert!((0.0..=2.0).contains(&rate), "{schedule:?}, step {step}: {rate}");
        }
    }
}

#[test]
fn a_scheduler_stands_still_inside_a_window_and_a_rate_set_by_hand_lasts_until_it_moves() {
    let acc = build(
        AcceleratorBuilder::default()
            .communicator(single())
            .gradient_accumulation_steps(2),
    );
    candle_nn::linear(2, 1, acc.var_builder(Weights::Random { seed: 0 }).unwrap()).unwrap();
    let mut optimizer = acc
        .prepare_optimizer(Box::new(Sgd {
            learning_rate: 1.0,
            ..Sgd::default()
        }))
        .unwrap();
    let mut scheduler = Scheduler::new(
        LinearSchedule {
            warmup_steps: 0,
            total_steps: 4,
        },
        &optimizer,
    );
    let mut rates = Vec::new();
    for micro_batch in 0..6 {
        acc.accumulate();
        if micro_batch == 2 {
            optimizer.set_learning_rate(9.0);
        }
        scheduler.step().unwrap();
        rates.push(optimizer.learning_rate());
    }
    assert_eq!(rates, [1.0, 0.75, 9.0, 0.5, 0.5, 0.25]);
}

#[test]
fn the_constant_schedule_keeps_the_optimizers_own_rate() {
    assert_eq!(
        [0, 1, 1000].map(|step| ConstantSchedule.learning_rate(0.3, step)),
        [0.3; 3]
    );
}

/// What a builder is told, and the steps of one call after a step that took place, by the number of ranks.
type Counting = (fn(AcceleratorBuilder) -> AcceleratorBuilder, fn(u64) -> u64);

/// Every way of counting; the first two are tied to the optimizer.
fn countings() -> Vec<Counting> {
    vec![
        (|builder| builder, |_| 1),
        (
            |builder| builder.schedule_advance(ScheduleAdvance::WorldSize),
            |ranks| ranks,
        ),
        (|builder| builder.step_scheduler_with_optimizer(false), |_| 1),
        (
            |builder| {
                builder
                    .step_scheduler_with_optimizer(false)
                    .schedule_advance(ScheduleAdvance::WorldSize)
            },
            |_| 1,
        ),
    ]
}

#[test]
fn a_scheduler_counts_as_accelerates_does_when_it_is_told_to() {
    // Accelerate's tests/test_scheduler.py: a rate of 1 - n/10, one good step, then one that overflows.
    for ranks in 1..=4 {
        for (number, (set, steps)) in countings().into_iter().enumerate() {
            on_ranks(ranks, |communicator| {
                let builder = AcceleratorBuilder::default()
                    .communicator(communicator)
                    .loss_scaling(LossScaling::Static(1.0));
                let acc = build(set(builder));
                let model = model(&*acc);
                let rule = Sgd {
                    learning_rate: 1.0,
                    ..Sgd::default()
                };
                let falling = LambdaSchedule::new(|step| 1.0 - step as f64 / 10.0);
                let loader = DataLoader::new(dataset(4 * ranks).2, 2);
                let (mut optimizer, mut loader, mut scheduler) = acc.prepare(rule, loader, falling).unwrap();
                let mut rates = Vec::new();
                for (batch, factor) in (&mut loader).into_iter().zip([1.0, f64::INFINITY]) {
                    acc.backward(&(loss(&model, &batch.unwrap()) * factor).unwrap())
                        .unwrap();
                    optimizer.step().unwrap();
                    scheduler.step().unwrap();
                    optimizer.zero_grad().unwrap();
                    rates.push(scheduler.learning_rate());
                }
                assert!(optimizer.step_was_skipped());
                let once = steps(ranks as u64);
                let twice = if number < 2 { once } else { 2 };
                let expected = [once, twice].map(|steps| 1.0 - steps as f64 / 10.0);
                assert_eq!(rates, expected, "{ranks} ranks, counting {number}");
                assert_eq!(scheduler.steps(), twice);
            });
        }
    }
}

#[test]
fn a_schedule_of_single_process_steps_ends_where_accelerates_does_with_accumulation() {
    // Accelerate: 2 ranks, linear decay over 20; the rate is 0 after 10 windows, and not before.
    for steps in [1, 2, 4] {
        on_ranks(2, |communicator| {
            let acc = build(
                AcceleratorBuilder::default()
                    .communicator(communicator)
                    .gradient_accumulation_steps(steps)
                    .schedule_advance(ScheduleAdvance::WorldSize),
            );
            let _model = model(&*acc);
            let optimizer = acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
            let decay = LinearSchedule {
                warmup_steps: 0,
                total_steps: 20,
            };
            let mut scheduler = Scheduler::new(decay, &optimizer);
            let mut rates = Vec::new();
            for _ in 0..10 * steps {
                acc.accumulate();
                scheduler.step().unwrap();
                rates.push(scheduler.learning_rate());
            }
            assert_eq!(rates.pop(), Some(0.0));
            assert!(rates.iter().all(|rate| *rate > 0.0));
        });
    }
}

#[test]
fn a_cycle_that_is_passed_keeps_its_last_rate() {
    let cycle = OneCycleLr::new(0.5, 2);
    on_ranks(3, |communicator| {
        let acc = build(
            AcceleratorBuilder::default()
                .communicator(communicator)
                .schedule_advance(ScheduleAdvance::WorldSize),
        );
        let _model = model(&*acc);
        let optimizer = acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
        let mut scheduler = Scheduler::new(cycle, &optimizer);
        scheduler.step().unwrap();
        assert_eq!(scheduler.steps(), 3);
        assert_eq!(scheduler.learning_rate(), cycle.learning_rate(1.0, 1));
    });
}
