//! Local SGD: each rank trains by itself, and every few steps all have the mean of their parameters.

use super::training::{dataset, gradient, loss, model, parameters};
use super::{build, deviation, on_ranks};
use sconce_core::{AcceleratorBuilder, Sgd, ZeroStage};

const RATE: f64 = 0.05;
const STEPS: usize = 7;
const BATCH: usize = 4;

/// The rows of a rank's batch in a step.
fn rows(rank: usize, world: usize, step: usize) -> Vec<usize> {
    let first = (step * world + rank) * BATCH;
    (first..first + BATCH).collect()
}

/// Plain SGD on every rank in f64, with averages after every `every` steps and at the end.
fn reference(initial: &[f32], world: usize, every: usize) -> Vec<f64> {
    let (features, targets, _) = dataset(world * STEPS * BATCH);
    let mut ranks = vec![Vec::from_iter(initial.iter().map(|p| f64::from(*p))); world];
    for step in 0..STEPS {
        for (rank, parameters) in ranks.iter_mut().enumerate() {
            let gradient = gradient(parameters, &features, &targets, &rows(rank, world, step));
            parameters.iter_mut().zip(gradient).for_each(|(p, g)| *p -= RATE * g);
        }
        if (step + 1) % every == 0 || step + 1 == STEPS {
            let mean = |i: usize| ranks.iter().map(|parameters| parameters[i]).sum::<f64>() / world as f64;
            let means = Vec::from_iter((0..initial.len()).map(mean));
            ranks.fill(means);
        }
    }
    ranks.remove(0)
}

#[test]
fn ranks_train_by_themselves_between_averages() {
    for world in 1..=4 {
        for every in [1, 3, 100] {
            let outcomes = on_ranks(world, |communicator| {
                let acc = build(AcceleratorBuilder::default().communicator(communicator));
                let model = model(&*acc);
                let initial = parameters(&model);
                let rule = Sgd {
                    learning_rate: RATE,
                    ..Sgd::default()
                };
                let mut optimizer = acc.prepare_optimizer(Box::new(rule)).unwrap();
                let data = dataset(world * STEPS * BATCH).2;
                let mut local_sgd = acc.local_sgd(every).unwrap();
                for step in 0..STEPS {
                    let rows = rows(acc.world().rank, world, step);
                    let batch = sconce_core::Dataset::batch(&data, &rows, acc.device()).unwrap();
                    acc.backward(&loss(&model, &batch)).unwrap();
                    optimizer.step().unwrap();
                    optimizer.zero_grad().unwrap();
                    local_sgd.step().unwrap();
                }
                local_sgd.finish().unwrap();
                (initial, parameters(&model))
            });
            for (initial, found) in &outcomes {
                let far = deviation(found, &reference(initial, world, every as usize));
                assert!(far < 1e-6, "world {world}, every {every}: {far:.1e}");
                assert_eq!(found, &outcomes[0].1, "all ranks have the mean");
            }
        }
    }
}

#[test]
fn gradients_are_synchronised_again_afterwards() {
    let outcomes = on_ranks(2, |communicator| {
        let acc = build(AcceleratorBuilder::default().communicator(communicator));
        let model = model(&*acc);
        let mut optimizer = acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
        acc.local_sgd(4).unwrap().finish().unwrap();
        let rows = rows(acc.world().rank, 2, 0);
        let batch = sconce_core::Dataset::batch(&dataset(16).2, &rows, acc.device()).unwrap();
        acc.backward(&loss(&model, &batch)).unwrap();
        optimizer.step().unwrap();
        parameters(&model)
    });
    assert_eq!(outcomes[0], outcomes[1]);
}

#[test]
fn sharded_state_and_no_steps_between_averages_are_refused() {
    let acc = build(AcceleratorBuilder::default().strategy(ZeroStage::One));
    let _model = model(&*acc);
    acc.prepare_optimizer(Box::new(Sgd::default())).unwrap();
    let error = acc.local_sgd(8).unwrap_err().to_string();
    assert!(
        error.contains("local SGD") && error.contains("use data parallelism"),
        "{error}"
    );
    let acc = build(AcceleratorBuilder::default());
    assert!(
        acc.local_sgd(0)
            .unwrap_err()
            .to_string()
            .contains("at least 1 optimizer step")
    );
}
