//! Schedules, against transformers' traces.

use super::{accelerator, build, fixture};
use sconce_collectives::single;
use sconce_core::schedule::ConstantSchedule;
use sconce_core::{AcceleratorBuilder, LinearSchedule, Schedule, Scheduler, Sgd, Weights};

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
