//! Ranks with fewer inputs than others: a rank that has none left goes along with its last batch, which counts for nothing.
//!
//! So every rank runs the same operations whatever is sharded, and nothing hangs. The gradients of the others count for more:
//! their mean is that of the ranks that have inputs.

use super::oracle::{batch, new_model};
use super::zero_stages::{EVERYTHING, STAGES, options};
use super::{bits, deviation, engine, flat, on_ranks, sgd, values};
use candle_core::{Device, Tensor};
use sconce_zero::{DataParallel, EngineOptions};

/// Inputs of a rank.
fn inputs(rank: usize) -> usize {
    [4, 2, 3, 1][rank]
}

fn train(world: usize, make: &(dyn Fn() -> EngineOptions + Sync)) -> Vec<Vec<f32>> {
    on_ranks(world, |communicator| {
        let engine = engine(&communicator, make());
        let model = new_model(&engine);
        engine.set_optimizer(sgd()).unwrap();
        let most = (0..world).map(inputs).max().unwrap();
        for step in 0..most {
            let active = (0..world).filter(|rank| step < inputs(*rank)).count();
            let own = inputs(communicator.rank());
            let weight = if step < own { world as f64 / active as f64 } else { 0.0 };
            let (rows, targets) = batch(10 * communicator.rank() + step.min(own - 1));
            // As a tensor: candle takes a factor of 0 for the end of a graph.
            let weight = Tensor::new(weight as f32, &Device::Cpu).unwrap();
            let loss = (model.loss(&rows, &targets) * weight).unwrap();
            engine.backward(&loss, true).unwrap();
            engine.step(0.1).unwrap();
            engine.zero_grad();
        }
        values(&engine)
    })
}

/// Trains one rank on the batches of all ranks that have one.
fn train_reference(world: usize) -> Vec<f64> {
    let engine = engine(&sconce_collectives::single(), EngineOptions::default());
    let model = new_model(&engine);
    engine.set_optimizer(sgd()).unwrap();
    for step in 0.. {
        let active = Vec::from_iter((0..world).filter(|rank| step < inputs(*rank)));
        if active.is_empty() {
            break;
        }
        for rank in &active {
            let (rows, targets) = batch(10 * rank + step);
            let loss = (model.loss(&rows, &targets) / active.len() as f64).unwrap();
            assert!(flat(&loss)[0].is_finite());
            engine.backward(&loss, true).unwrap();
        }
        engine.step(0.1).unwrap();
        engine.zero_grad();
    }
    values(&engine).into_iter().map(f64::from).collect()
}

#[test]
fn the_mean_is_that_of_the_ranks_with_inputs_and_no_rank_waits_for_ever() {
    for world in 1..=4 {
        let expected = train_reference(world);
        let parallel = train(world, &|| options(DataParallel));
        let found = deviation(&parallel[0], &expected);
        assert!(found < 1e-6, "world {world}: {found}");
        let sharded = [STAGES[0], STAGES[1], EVERYTHING].map(|stage| train(world, &|| options(stage)));
        for values in sharded.iter().flatten().chain(&parallel) {
            assert_eq!(bits(values), bits(&parallel[0]), "world {world}");
        }
    }
}
