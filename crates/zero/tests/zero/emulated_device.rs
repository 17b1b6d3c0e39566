//! Parameters out of the engine's reach, as on a GPU: treating the CPU's memory so must not change a bit.
//!
//! That every model of `units`, `frozen` and `interleaving` comes to the same bits so is part of [`parity`](super::parity).

use super::oracle::{batch, new_model};
use super::parity::{SHARDED, WIDTH, builder, rows, weight};
use super::precision::train;
use super::zero_stages::{EVERYTHING, STAGES, options};
use super::{bits, engine, flat, on_ranks, sgd, values};
use candle_core::{DType, Module};
use candle_nn::{ParamsAdamW, linear};
use sconce_zero::{
    CandleOptimizer, DataParallel, DiskOptions, EngineOptions, Offloaded, ParameterSet, ShardingStrategy, Tier, unit,
};

fn emulated(options: EngineOptions) -> EngineOptions {
    EngineOptions {
        emulate_device: true,
        ..options
    }
}

#[test]
fn every_stage_and_state_on_disk_come_to_the_same_bits_in_every_dtype() {
    let folder = tempfile::tempdir().unwrap();
    let on_disk = || EngineOptions {
        disk: Some(DiskOptions {
            folder: folder.path().into(),
            sub_group_elements: 50,
        }),
        ..options(Offloaded {
            strategy: Box::new(DataParallel),
            parameters: Tier::Device,
            optimizer_state: Tier::Disk,
        })
    };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for world in 1..=3 {
            let expected = train(world, 2 * world, dtype, &|| options(DataParallel));
            let found = train(world, 2 * world, dtype, &|| emulated(options(DataParallel)));
            assert_eq!(found, expected, "{dtype:?}, world {world}");
            let found = train(world, 2 * world, dtype, &|| emulated(on_disk()));
            assert_eq!(found, expected, "disk, {dtype:?}, world {world}");
            for stage in STAGES {
                let expected = train(world, 2 * world, dtype, &|| options(stage));
                let found = train(world, 2 * world, dtype, &|| emulated(options(stage)));
                assert_eq!(found, expected, "{stage:?}, {dtype:?}, world {world}");
            }
        }
    }
}

#[test]
fn edits_and_candles_optimizers_reach_the_values() {
    let strategies: [fn() -> Box<dyn ShardingStrategy>; 3] = [
        || Box::new(DataParallel),
        || Box::new(STAGES[0]),
        || Box::new(EVERYTHING),
    ];
    for strategy in strategies {
        let run = |emulate_device: bool| {
            on_ranks(2, |communicator| {
                let options = EngineOptions {
                    emulate_device,
                    strategy: strategy(),
                    ..EngineOptions::default()
                };
                let engine = engine(&communicator, options);
                let model = new_model(&engine);
                let optimizer = CandleOptimizer::new::<candle_nn::AdamW>(ParamsAdamW::default());
                engine.set_candle_optimizer(optimizer).unwrap();
                let edit = engine.edit(&ParameterSet::all(), 1, |scope| {
                    let name = scope.names().next().unwrap();
                    scope.set(name, &(scope.get(name)? * 3.0)?)
                });
                edit.unwrap();
                let (rows, targets) = batch(0);
                engine.backward(&model.loss(&rows, &targets), true).unwrap();
                engine.step(0.1).unwrap();
                let local = engine.local_tensors().unwrap();
                let local: Vec<_> = local.iter().map(|tensor| bits(&flat(&tensor.values))).collect();
                (bits(&values(&engine)), local)
            })
        };
        assert_eq!(run(true), run(false));
    }
}

#[test]
fn a_parameter_used_outside_of_its_unit_is_an_error() {
    let engine = engine(&sconce_collectives::single(), emulated(options(SHARDED)));
    let layer = unit(builder(&engine), "layer", |vb| linear(WIDTH, WIDTH, vb)).unwrap();
    let whole = weight(&builder(&engine), (WIDTH, 2), "outside").unwrap();
    engine.set_optimizer(sgd()).unwrap();
    assert!(layer.module().forward(&rows(0, 0)).is_err());
    let output = layer.forward(&rows(0, 0)).unwrap().matmul(&whole).unwrap();
    assert!(flat(&output).iter().all(|value| value.is_finite()));
    assert!(layer.module().forward(&rows(0, 0)).is_err());
}

#[test]
fn memory_for_copies_is_reported() {
    let engine = engine(&sconce_collectives::single(), emulated(options(DataParallel)));
    weight(&builder(&engine), (100, 3), "large").unwrap();
    weight(&builder(&engine), 7, "small").unwrap();
    assert_eq!(engine.memory().buffers, 100 * 3 * 4);
}
