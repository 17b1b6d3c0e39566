//! What is random on a rank follows from the run's seed and the rank.

use super::{bits, build, flat, on_ranks};
use candle_core::{DType, Device, Module, Tensor};
use sconce_core::nn::Dropout;
use sconce_core::{Accelerator, AcceleratorBuilder, AdamW, FullyShardedOptions, Weights, WrapPolicy, unit};

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

#[test]
fn activation_checkpointing_drops_the_same_elements() {
    let train = |activation_checkpointing| {
        on_ranks(2, |communicator| {
            let options = FullyShardedOptions {
                auto_wrap_policy: Some(WrapPolicy::transformer_based([])),
                activation_checkpointing: Some(activation_checkpointing),
                ..FullyShardedOptions::default()
            };
            let builder = AcceleratorBuilder::default().fully_sharded(options);
            let acc = build(builder.communicator(communicator));
            let vb = acc.var_builder(Weights::Random { seed: 1 }).unwrap();
            let layers = ["first", "second"].map(|name| {
                unit(vb.clone(), name, |vb| {
                    Ok((candle_nn::linear(8, 8, vb)?, Dropout::new(0.5)))
                })
                .unwrap()
            });
            let mut optimizer = acc.prepare_optimizer(Box::new(AdamW::default())).unwrap();
            let mut losses = Vec::new();
            for _ in 0..3 {
                let mut hidden = Tensor::ones((4, 8), DType::F32, &Device::Cpu).unwrap();
                for layer in &layers {
                    let dropped = layer.run(hidden, |(linear, dropout), xs| {
                        dropout.forward(&linear.forward(&xs)?.tanh()?, true)
                    });
                    hidden = dropped.unwrap();
                }
                let loss = hidden.sqr().unwrap().mean_all().unwrap();
                acc.backward(&loss).unwrap();
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
                losses.push(loss.to_scalar::<f32>().unwrap());
            }
            let state = acc.state_dict().unwrap();
            let weights = state.iter().flat_map(|(_, tensor)| bits(&flat(tensor)));
            (bits(&losses), weights.collect::<Vec<u32>>())
        })
    };
    let (kept, recomputed) = (train(false), train(true));
    assert_ne!(kept[0].0, kept[1].0, "ranks differ only by what they drop");
    assert_eq!(recomputed, kept);
}
