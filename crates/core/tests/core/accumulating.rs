//! Gradient accumulation, announced by `accumulate()`.

use super::training::{FEATURES, dataset, gradient, loss, model, parameters};
use super::{bits, build, deviation, fixture, on_ranks};
use sconce_collectives::{Communicator, single};
use sconce_core::schedule::ConstantSchedule;
use sconce_core::{Accelerator, AcceleratorBuilder, DataLoader, Error, LinearSchedule, Sgd};
use std::sync::Arc;

fn accumulating(communicator: Arc<dyn Communicator>, steps: u64) -> Box<dyn Accelerator> {
    build(
        AcceleratorBuilder::default()
            .communicator(communicator)
            .gradient_accumulation_steps(steps),
    )
}

#[test]
fn windows_end_where_accelerates_do() {
    for row in fixture("accumulation.json")["rows"].as_array().unwrap() {
        let batches = row["micro_batches"].as_u64().unwrap() as usize;
        // The engine reduces when a window ends; reducing in every micro-batch moves no window either.
        let builder = AcceleratorBuilder::default()
            .communicator(single())
            .gradient_accumulation_steps(row["accumulation_steps"].as_u64().unwrap())
            .sync_with_dataloader(row["sync_with_dataloader"].as_bool().unwrap());
        let acc = build(builder);
        let mut loader = acc.prepare_loader(DataLoader::new(dataset(batches).2, 1)).unwrap();
        for epoch in row["sync_flags"].as_array().unwrap() {
            let mut flags = Vec::new();
            for batch in &mut loader {
                batch.unwrap();
                acc.accumulate();
                flags.push(serde_json::Value::from(acc.sync_gradients()));
            }
            assert_eq!(&flags, epoch.as_array().unwrap(), "{row}");
        }
    }
}

const RATE: f64 = 0.2;
const EPOCHS: usize = 2;
/// Rows that make five micro-batches of 12 over all ranks.
const ROWS: usize = 60;

fn train(communicator: Arc<dyn Communicator>, steps: u64) -> (Vec<f32>, Vec<Option<f64>>, f64) {
    let acc = accumulating(communicator, steps);
    let model = model(&*acc);
    let loader = DataLoader::new(dataset(ROWS).2, 12 / acc.world().size);
    let rule = Sgd {
        learning_rate: RATE,
        momentum: 0.9,
        ..Sgd::default()
    };
    let schedule = LinearSchedule {
        warmup_steps: 0,
        total_steps: 100,
    };
    let (mut optimizer, mut loader, mut scheduler) = acc.prepare(rule, loader, schedule).unwrap();
    let mut norms = Vec::new();
    for _ in 0..EPOCHS {
        for batch in &mut loader {
            acc.accumulate();
            acc.backward(&loss(&model, &batch.unwrap())).unwrap();
            norms.push(acc.clip_grad_norm(1e9).unwrap());
            let before = parameters(&model);
            optimizer.step().unwrap();
            assert_eq!(parameters(&model) != before, acc.sync_gradients());
            scheduler.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
    }
    (parameters(&model), norms, optimizer.learning_rate())
}

#[test]
fn a_window_is_one_step_of_the_summed_losses_over_the_number_of_steps() {
    let (features, targets, _) = dataset(ROWS);
    for steps in [2, 3] {
        let mut expected: Vec<f64> = parameters(&model(&*accumulating(single(), steps)))
            .iter()
            .map(|p| f64::from(*p))
            .collect();
        let mut momentum = vec![0.0; FEATURES + 1];
        let mut window = vec![0.0; FEATURES + 1];
        let mut taken = 0;
        for _ in 0..EPOCHS {
            for micro_batch in 0..ROWS / 12 {
                let rows: Vec<usize> = (micro_batch * 12..micro_batch * 12 + 12).collect();
                let own = gradient(&expected, &features, &targets, &rows);
                window
                    .iter_mut()
                    .zip(own)
                    .for_each(|(sum, own)| *sum += own / steps as f64);
                if (micro_batch + 1) % steps as usize == 0 || micro_batch + 1 == ROWS / 12 {
                    let rate = RATE * (100 - taken) as f64 / 100.0;
                    for ((p, m), g) in expected.iter_mut().zip(&mut momentum).zip(&mut window) {
                        *m = 0.9 * *m + *g;
                        *p -= rate * *m;
                        *g = 0.0;
                    }
                    taken += 1;
                }
            }
        }
        for world in 1..=4 {
            let ranks = on_ranks(world, |communicator| train(communicator, steps));
            for (found, norms, rate) in &ranks {
                let worst = deviation(found, &expected);
                println!("world {world}, {steps} steps: {worst:.2e}");
                assert!(worst < 2e-6, "world {world}, {steps} steps: {worst}");
                assert_eq!(norms.iter().flatten().count(), taken);
                assert!((rate - RATE * (100 - taken) as f64 / 100.0).abs() < 1e-12);
                assert_eq!(bits(found), bits(&ranks[0].0));
            }
        }
    }
}

/// Runs one epoch whose loop calls `accumulate` where `announce` says so; returns the first error.
fn outcome(steps: u64, announce: fn(usize) -> bool) -> Result<(), Error> {
    let acc = accumulating(single(), steps);
    let model = model(&*acc);
    let (mut optimizer, mut loader, _) = acc
        .prepare(Sgd::default(), DataLoader::new(dataset(8).2, 2), ConstantSchedule)
        .unwrap();
    for (number, batch) in (&mut loader).into_iter().enumerate() {
        if announce(number) {
            acc.accumulate();
        }
        acc.backward(&loss(&model, &batch?))?;
        optimizer.step()?;
        optimizer.zero_grad()?;
    }
    Ok(())
}

#[test]
fn a_loop_that_does_not_call_accumulate_is_an_error_when_windows_are_longer_than_one() {
    outcome(1, |_| false).unwrap();
    outcome(2, |_| true).unwrap();
    for announce in [|_| false, |number| number == 0, |number| number % 2 == 1] as [fn(usize) -> bool; 3] {
        let error = outcome(2, announce).unwrap_err();
        assert!(matches!(error, Error::Order { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("accumulate()") && text.contains("2 micro-batches"),
            "{text}"
        );
    }
}

#[test]
fn an_evaluation_within_the_training_loop_does_not_move_its_windows() {
    let acc = accumulating(single(), 2);
    let model = model(&*acc);
    let (_, mut loader, _) = acc
        .prepare(Sgd::default(), DataLoader::new(dataset(10).2, 2), ConstantSchedule)
        .unwrap();
    let mut evaluation = acc.prepare_loader(DataLoader::new(dataset(2).2, 1)).unwrap();
    let mut flags = Vec::new();
    for batch in &mut loader {
        let batch = batch.unwrap();
        (&mut evaluation).into_iter().for_each(|batch| drop(batch.unwrap()));
        acc.accumulate();
        (&mut evaluation)
            .into_iter()
            .take(1)
            .for_each(|batch| drop(batch.unwrap()));
        acc.backward(&loss(&model, &batch)).unwrap();
        flags.push(acc.sync_gradients());
    }
    assert_eq!(flags, [false, true, false, true, true]);
}
