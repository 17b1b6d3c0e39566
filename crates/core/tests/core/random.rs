//! What is random on a rank follows from the run's seed and the rank.

use super::{build, flat, on_ranks};
use candle_core::{DType, Device, Tensor};
use sconce_core::nn::Dropout;
use sconce_core::{Accelerator, AcceleratorBuilder};

/// The next mask that each rank draws, after `prepare` has seen its accelerator.
fn masks(ranks: usize, seed: u64, prepare: impl Fn(&dyn Accelerator) + Sync) -> Vec<Vec<f32>> {
    on_ranks(ranks, |communicator| {
        let acc = build(AcceleratorBuilder::default().seed(seed).communicator(communicator));
        prepare(&*acc);
        let ones = Tensor::ones(100, DType::F32, &Device::Cpu).unwrap();
        flat(&Dropout::new(0.5).forward(&ones, true).unwrap())
    })
}

#[test]
fn ranks_draw_differently_and_runs_repeat() {
    let first = masks(3, 5, |_| ());
    assert!(first[0] != first[1] && first[1] != first[2] && first[0] != first[2]);
    assert_eq!(masks(3, 5, |_| ()), first);
    // More ranks, other seeds: the first rank of a seed is the same in every world.
    assert_eq!(masks(1, 5, |_| ())[0], first[0]);
    for other in masks(3, 6, |_| ()) {
        assert!(!first.contains(&other));
    }
}

#[test]
fn setting_the_seed_begins_anew() {
    let first = masks(2, 5, |_| ());
    let drawn_from = masks(2, 5, |_| {
        sconce_core::RandomState::draw_key();
    });
    assert_ne!(drawn_from, first);
    let set_anew = masks(2, 7, |acc| {
        sconce_core::RandomState::draw_key();
        acc.set_seed(5);
    });
    assert_eq!(set_anew, first);
}
