//! Fully sharded data parallelism trains as data parallelism does, and holds what its strategy says.

use super::training::{FEATURES, dataset};
use super::{bits, build, on_ranks};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module};
use sconce_collectives::Communicator;
use sconce_core::{
    AcceleratorBuilder, AdamW, BackwardPrefetch, DataLoader, FsdpStrategy, FullyShardedOptions, IgnoredModules,
    MemoryReport, Unit, Weights, WrapPolicy, unit,
};
use std::sync::Arc;

/// Trains a unit of odd size for some steps; returns norms and final parameters, as bits.
fn train(builder: AcceleratorBuilder, communicator: Arc<dyn Communicator>) -> (Vec<u64>, Vec<u32>) {
    let acc = build(builder.communicator(communicator));
    let vb = acc.var_builder(Weights::Random { seed: 4 }).unwrap();
    let model: Unit<Linear> = unit(vb, "layer", |vb| candle_nn::linear(FEATURES, 1, vb)).unwrap();
    let loader = DataLoader::new(dataset(24).2, 12 / acc.world().size);
    let (mut optimizer, mut loader, mut scheduler) = acc
        .prepare(AdamW::default(), loader, sconce_core::schedule::ConstantSchedule)
        .unwrap();
    let mut norms = Vec::new();
    for _ in 0..2 {
        for batch in &mut loader {
            let batch = batch.unwrap();
            let error = (model.forward(&batch[0]).unwrap() - &batch[1]).unwrap();
            acc.backward(&error.sqr().unwrap().mean_all().unwrap()).unwrap();
            norms.push(
                acc.clip_grad_norm(0.5)
                    .unwrap()
                    .expect("every step synchronises")
                    .to_bits(),
            );
            optimizer.step().unwrap();
            scheduler.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
    }
    let state = acc.state_dict().unwrap();
    let values = state.iter().flat_map(|(_, tensor)| bits(&super::flat(tensor)));
    (norms, values.collect())
}

/// Elements of the weight and the bias of [`weigh`]'s layer.
const ELEMENTS: [usize; 2] = [31 * 33, 33];

/// Takes a step with a layer as a unit; returns what a rank's memory holds then.
fn weigh(options: FullyShardedOptions, communicator: Arc<dyn Communicator>) -> MemoryReport {
    let acc = build(
        AcceleratorBuilder::default()
            .fully_sharded(options)
            .communicator(communicator),
    );
    let vb = acc.var_builder(Weights::Random { seed: 4 }).unwrap();
    let model = unit(vb, "layer", |vb| candle_nn::linear(31, 33, vb)).unwrap();
    let mut optimizer = acc.prepare_optimizer(Box::new(AdamW::default())).unwrap();
    let inputs = Tensor::ones((2, 31), DType::F32, &Device::Cpu).unwrap();
    acc.backward(&model.forward(&inputs).unwrap().sqr().unwrap().mean_all().unwrap())
        .unwrap();
    optimizer.step().unwrap();
    acc.memory()
}

#[test]
fn a_rank_holds_its_share_of_what_the_strategy_shards_and_nothing_gathered_between_steps() {
    for ranks in 1..=4 {
        // Shares begin on cache lines, 16 elements each.
        let share = |elements: usize| elements.div_ceil(ranks).next_multiple_of(16);
        let shares: usize = ELEMENTS.map(share).iter().sum();
        // Optimizer state has two moments, laid out by shares whether it is sharded or not.
        for (strategy, held, moment) in [
            (FsdpStrategy::FullShard, shares, shares),
            (FsdpStrategy::ShardGradOp, shares, shares),
            (FsdpStrategy::NoShard, ELEMENTS.iter().sum(), ranks * shares),
        ] {
            let options = || FullyShardedOptions {
                sharding_strategy: Some(strategy),
                auto_wrap_policy: Some(WrapPolicy::transformer_based([])),
                ..FullyShardedOptions::default()
            };
            let report = on_ranks(ranks, |communicator| weigh(options(), communicator)).remove(0);
            let found = (report.parameters, report.optimizer_state, report.gathered);
            let bytes = |elements: usize| (elements * size_of::<f32>()) as u64;
            assert_eq!(
                found,
                (bytes(held), bytes(2 * moment), 0),
                "{strategy:?} on {ranks} ranks"
            );
        }
    }
}

#[test]
fn every_strategy_trains_to_the_bits_of_data_parallelism() {
    for ranks in 1..=4 {
        let expected = on_ranks(ranks, |communicator| train(AcceleratorBuilder::default(), communicator));
        for strategy in STRATEGIES {
            for (ignored, prefetch) in [(None, None), (Some("layer"), None), (None, Some(BackwardPrefetch::Pre))] {
                let options = || FullyShardedOptions {
                    sharding_strategy: Some(strategy),
                    auto_wrap_policy: Some(WrapPolicy::transformer_based([])),
                    ignored_modules: ignored.map(|pattern| IgnoredModules::new(pattern).unwrap()),
                    backward_prefetch: prefetch,
                    shard_group: strategy.is_hybrid().then_some(if ranks % 2 == 0 { 2 } else { ranks }),
                    ..FullyShardedOptions::default()
                };
                let found = on_ranks(ranks, |communicator| {
                    train(AcceleratorBuilder::default().fully_sharded(options()), communicator)
                });
                assert_eq!(
                    found, expected,
                    "{strategy:?} {ignored:?} {prefetch:?} on {ranks} ranks"
                );
            }
        }
    }
}

#[test]
fn one_group_of_a_hybrid_strategy_is_told_by_the_settings_of_the_run() {
    let notices = on_ranks(2, |communicator| {
        let options = FullyShardedOptions {
            sharding_strategy: Some(FsdpStrategy::HybridShard),
            auto_wrap_policy: Some(WrapPolicy::transformer_based([])),
            ..FullyShardedOptions::default()
        };
        let builder = AcceleratorBuilder::default().fully_sharded(options);
        let acc = build(builder.communicator(communicator));
        acc.settings().notices(acc.device())
    });
    for notices in notices {
        let told = "HYBRID_SHARD on one host is FULL_SHARD";
        assert_eq!(
            notices.iter().filter(|notice| notice.starts_with(told)).count(),
            1,
            "{notices:?}"
        );
    }
}

#[test]
fn a_world_that_groups_do_not_divide_is_refused_before_anything_is_made() {
    let options = || FullyShardedOptions {
        sharding_strategy: Some(FsdpStrategy::HybridShard),
        shard_group: Some(2),
        ..FullyShardedOptions::default()
    };
    let messages = on_ranks(3, |communicator| {
        let builder = AcceleratorBuilder::default()
            .fully_sharded(options())
            .communicator(communicator);
        builder.build_with(|_| None).map(drop).expect_err("refused").to_string()
    });
    assert_eq!(
        messages,
        ["shard_group=\"2\": expected a divisor of the number of ranks, 3"; 3]
    );
}

const STRATEGIES: [FsdpStrategy; 5] = [
    FsdpStrategy::FullShard,
    FsdpStrategy::ShardGradOp,
    FsdpStrategy::NoShard,
    FsdpStrategy::HybridShard,
    FsdpStrategy::HybridShardZero2,
];
