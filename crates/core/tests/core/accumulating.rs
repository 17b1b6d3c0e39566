//! Gradient accumulation, announced by `accumulate()`.

use super::training::{FEATURES, dataset, gradient, loss, model, parameters};
use super::{bits, build, deviation, fixture, on_ranks};
use sconce_collectives::{Communicator, single};
use sconce_core::schedule::ConstantSchedule;
use sconce_core::{Accelerator, AcceleratorBuilder, DataLoader, Error, LinearSchedule, Sgd, ZeroStage};
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

/// Runs loops of `batches` micro-batches over a loader of five; returns where windows of two end.
fn flags_of(ends_with_loader: bool, batches: usize) -> [Vec<bool>; 2] {
    let builder = AcceleratorBuilder::default()
        .communicator(single())
        .gradient_accumulation_steps(2)
        .sync_with_dataloader(ends_with_loader);
    let acc = build(builder);
    let mut loader = acc.prepare_loader(DataLoader::new(dataset(5).2, 1)).unwrap();
    [(); 2].map(|()| {
        let mut flags = Vec::new();
        for batch in &mut loader {
            batch.unwrap();
            acc.accumulate();
            flags.push(acc.sync_gradients());
            if flags.len() == batches {
                break;
            }
        }
        flags
    })
}

#[test]
fn a_window_goes_on_in_the_next_loop_after_a_break_and_where_loaders_do_not_end_it() {
    // Accelerate's, with 5 batches in an epoch and 2 in a window.
    let rows = |rows: [&[u8]; 2]| rows.map(|row| Vec::from_iter(row.iter().map(|flag| *flag == 1)));
    assert_eq!(flags_of(true, 5), rows([&[0, 1, 0, 1, 1], &[0, 1, 0, 1, 1]]));
    assert_eq!(flags_of(false, 5), rows([&[0, 1, 0, 1, 0], &[1, 0, 1, 0, 1]]));
    assert_eq!(flags_of(true, 3), rows([&[0, 1, 0], &[1, 0, 1]]));
    assert_eq!(flags_of(false, 3), rows([&[0, 1, 0], &[1, 0, 1]]));
}

/// Differentiates the losses of three micro-batches; `around` says how each backward is run. Returns the norm of the
/// gradients held after each, by rank.
fn norms_of(
    builder: impl Fn() -> AcceleratorBuilder + Sync,
    around: fn(&dyn Accelerator, usize, &dyn Fn()),
) -> Vec<Vec<f64>> {
    on_ranks(2, |communicator| {
        let acc = build(builder().communicator(communicator));
        let model = model(&*acc);
        let (_, mut loader, _) = acc
            .prepare(Sgd::default(), DataLoader::new(dataset(18).2, 3), ConstantSchedule)
            .unwrap();
        let batches = (&mut loader).into_iter().map(Result::unwrap).enumerate();
        batches
            .map(|(number, batch)| {
                around(&*acc, number, &|| acc.backward(&loss(&model, &batch)).unwrap());
                acc.engine().grad_norm().unwrap()
            })
            .collect()
    })
}

/// The norm of the gradient of the first `count` micro-batches of six rows, each of which is divided by `divisor`.
fn expected_norm(count: usize, divisor: f64) -> f64 {
    let (features, targets, _) = dataset(18);
    let initial = parameters(&model(&*accumulating(single(), 1)));
    let initial: Vec<f64> = initial.iter().map(|p| f64::from(*p)).collect();
    let mut sum = [0.0; FEATURES + 1];
    for micro in 0..count {
        let rows: Vec<usize> = (micro * 6..micro * 6 + 6).collect();
        let own = gradient(&initial, &features, &targets, &rows);
        sum.iter_mut().zip(own).for_each(|(sum, own)| *sum += own / divisor);
    }
    sum.iter().map(|value| value * value).sum::<f64>().sqrt()
}

fn agree(norms: &[Vec<f64>], micro: usize) -> bool {
    norms
        .iter()
        .all(|rank| rank[micro].to_bits() == norms[0][micro].to_bits())
}

#[test]
fn gradients_are_global_after_every_backward_of_a_window_only_if_each_batch_is_reduced() {
    let in_windows = |each: bool| {
        let around = |acc: &dyn Accelerator, _: usize, backward: &dyn Fn()| {
            acc.accumulate();
            backward();
        };
        let builder = || {
            AcceleratorBuilder::default()
                .gradient_accumulation_steps(3)
                .sync_each_batch(each)
        };
        norms_of(builder, around)
    };
    let (local, global) = (in_windows(false), in_windows(true));
    assert_eq!([0, 1, 2].map(|micro| agree(&local, micro)), [false, false, true]);
    for micro in 0..3 {
        assert!(agree(&global, micro));
        let expected = expected_norm(micro + 1, 3.0);
        assert!((global[0][micro] / expected - 1.0).abs() < 1e-5, "micro-batch {micro}");
    }
    assert!((local[0][2] / global[0][2] - 1.0).abs() < 1e-6);
}

#[test]
fn gradients_of_a_scope_without_reduction_stay_local_until_a_backward_is_told_to_reduce_them() {
    // As Accelerate's test of trigger_sync_in_backward: three forwards under no_sync, the last backward triggered.
    let triggered = norms_of(AcceleratorBuilder::default, |acc, number, backward| {
        acc.no_sync(|| {
            if number == 2 {
                acc.trigger_sync_in_backward();
            }
            backward();
        });
    });
    let outside = norms_of(AcceleratorBuilder::default, |acc, number, backward| match number {
        2 => backward(),
        _ => acc.no_sync(backward),
    });
    for norms in [triggered, outside] {
        assert_eq!([0, 1, 2].map(|micro| agree(&norms, micro)), [false, false, true]);
        assert!((norms[0][2] / expected_norm(3, 1.0) - 1.0).abs() < 1e-5);
    }
    let in_a_window = norms_of(
        || AcceleratorBuilder::default().gradient_accumulation_steps(3),
        |acc, number, backward| {
            acc.accumulate();
            if number == 1 {
                acc.trigger_sync_in_backward();
            }
            backward();
            assert_eq!(acc.sync_gradients(), number == 2);
        },
    );
    assert_eq!([0, 1, 2].map(|micro| agree(&in_a_window, micro)), [false, true, true]);
}

#[test]
fn sharded_gradients_are_reduced_without_regard_to_a_scope_and_a_step_of_local_ones_is_an_error() {
    let local = |builder: fn() -> AcceleratorBuilder| {
        on_ranks(2, |communicator| {
            let acc = build(builder().communicator(communicator));
            let model = model(&*acc);
            let mut optimizer = acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
            let mut loader = acc.prepare_loader(DataLoader::new(dataset(6).2, 3)).unwrap();
            for batch in &mut loader {
                acc.no_sync(|| acc.backward(&loss(&model, &batch.unwrap())).unwrap());
            }
            let text = optimizer.step().unwrap_err().to_string();
            assert!(text.contains("must synchronise"), "{text}");
            // What is left of no_sync ends with it.
            optimizer.zero_grad().unwrap();
            for batch in &mut loader {
                acc.backward(&loss(&model, &batch.unwrap())).unwrap();
            }
            optimizer.step().unwrap();
            acc.traffic().iter().map(|traffic| traffic.calls).sum::<u64>()
        })
    };
    let replicated = local(AcceleratorBuilder::default);
    let sharded = local(|| AcceleratorBuilder::default().strategy(ZeroStage::Two));
    assert!(sharded[0] > replicated[0], "{sharded:?} {replicated:?}");
}
