//! What is forecast of a model is what an engine that holds it counts.

use super::parity::SHARDED;
use super::{buckets, engine, on_ranks};
use candle_core::{DType, Device, Tensor};
use candle_nn::Init;
use sconce_zero::{
    AdamW, BackwardPrefetch, DataParallel, DiskOptions, EngineOptions, Gathering, MemoryForecast, MemoryReport,
    Offloaded, ParameterInfo, PlannedParameter, ShardingStrategy, Tier, Unit, Weights, ZeroStage, unit,
};

/// Rows and columns of the matrices of each unit; the last lie in none.
const UNITS: [&[(usize, usize)]; 4] = [
    &[(40, 7)],
    &[(7, 33), (33, 7), (7, 1)],
    &[(7, 21), (21, 7)],
    &[(7, 50), (50, 7)],
];
const OUTSIDE: (usize, usize) = (7, 5);

type Strategy = fn() -> Box<dyn ShardingStrategy>;

fn planned(dtype: DType) -> Vec<PlannedParameter> {
    let parameter = |name: String, (rows, columns), units| PlannedParameter {
        info: ParameterInfo {
            name,
            shape: vec![rows, columns],
        },
        dtype,
        is_trained: true,
        units,
    };
    let mut planned = Vec::new();
    for (number, matrices) in UNITS.iter().enumerate() {
        let of_unit = matrices.iter().enumerate();
        planned.extend(of_unit.map(|(matrix, shape)| parameter(format!("{number}.{matrix}"), *shape, vec![number])));
    }
    planned.push(parameter("outside".into(), OUTSIDE, Vec::new()));
    planned
}

/// Trains for some steps; returns what each rank holds.
fn held(world: usize, dtype: DType, options: &(dyn Fn() -> EngineOptions + Sync)) -> Vec<MemoryReport> {
    on_ranks(world, |communicator| {
        let engine = engine(&communicator, options());
        let weights = Weights::Random { seed: 1 };
        let vb = engine.var_builder(weights, dtype, &Device::Cpu).unwrap();
        let matrix = |vb: &candle_nn::VarBuilder<'_>, shape, name: &str| {
            vb.get_with_hints(shape, name, Init::Const(0.01)).unwrap()
        };
        let build = |(number, matrices): (usize, &&[(usize, usize)])| {
            let made = unit(vb.clone(), &number.to_string(), |vb| {
                let of_unit = matrices.iter().enumerate();
                Ok(of_unit
                    .map(|(name, shape)| matrix(&vb, *shape, &name.to_string()))
                    .collect())
            });
            made.unwrap()
        };
        let units: Vec<Unit<Vec<Tensor>>> = UNITS.iter().enumerate().map(build).collect();
        let outside = matrix(&vb, OUTSIDE, "outside");
        engine.set_optimizer(Box::new(AdamW::default())).unwrap();
        for _ in 0..3 {
            let mut loss = Tensor::zeros((), DType::F32, &Device::Cpu).unwrap();
            for unit in &units {
                let sum = |matrices: &Vec<Tensor>, loss: Tensor| {
                    let each = matrices
                        .iter()
                        .map(|matrix| matrix.to_dtype(DType::F32)?.sqr()?.sum_all());
                    each.into_iter().try_fold(loss, |loss, sum| loss + sum?)
                };
                loss = unit.run(loss, sum).unwrap();
            }
            let last = outside.to_dtype(DType::F32).unwrap().sqr().unwrap().sum_all().unwrap();
            engine.backward(&(loss + last).unwrap(), true).unwrap();
            engine.step(0.1).unwrap();
            engine.zero_grad();
        }
        engine.memory()
    })
}

fn check(world: usize, dtype: DType, options: &(dyn Fn() -> EngineOptions + Sync), what: &str) {
    let forecast = MemoryForecast::new(&planned(dtype), &options(), world, 2).on_cpu();
    let held = held(world, dtype, options);
    let counted = MemoryReport {
        // Nothing is gathered at the end of a step, and what is spare may be less than the limit.
        gathered: forecast.gathered,
        spare: forecast.spare,
        ..held[0]
    };
    assert_eq!(forecast, counted, "{what}, {dtype:?}, world {world}");
    assert!(held[0].spare <= forecast.gathered + forecast.spare, "{what}: {held:?}");
    let largest = held.iter().map(|held| held.total() - held.spare).max();
    assert_eq!(
        largest,
        Some(forecast.total() - forecast.gathered - forecast.spare),
        "{what}, world {world}"
    );
}

#[test]
fn forecasts_are_what_ranks_hold_under_every_strategy() {
    let strategies: [(&str, Strategy); 5] = [
        ("data parallel", || Box::new(DataParallel)),
        ("stage 1", || Box::new(ZeroStage::One)),
        ("stage 2", || Box::new(ZeroStage::Two)),
        ("stage 3", || Box::new(SHARDED)),
        ("stage 3 with whole parameters", || {
            Box::new(ZeroStage::Three {
                persistence_threshold: 200,
            })
        }),
    ];
    for (what, strategy) in strategies {
        for world in 1..=4 {
            for dtype in [DType::F32, DType::BF16] {
                for bucket in [0, 2000, 1 << 20] {
                    let options = move || EngineOptions {
                        strategy: strategy(),
                        ..buckets(bucket, bucket)
                    };
                    check(world, dtype, &options, &format!("{what}, buckets of {bucket}"));
                }
            }
        }
    }
}

#[test]
fn forecasts_play_gathers_through_as_they_come() {
    for (prefetch_units, prefetch_elements) in [
        (0, usize::MAX),
        (1, usize::MAX),
        (2, usize::MAX),
        (usize::MAX, 400),
        (usize::MAX, 0),
    ] {
        for (forward_prefetch, backward_prefetch, reshard_after_forward) in [
            (true, BackwardPrefetch::Pre, true),
            (false, BackwardPrefetch::Pre, true),
            (false, BackwardPrefetch::Post, true),
            (true, BackwardPrefetch::None, true),
            (false, BackwardPrefetch::None, false),
        ] {
            let options = || EngineOptions {
                strategy: Box::new(SHARDED),
                gathering: Gathering {
                    prefetch_elements,
                    prefetch_units,
                    forward_prefetch,
                    backward_prefetch,
                    reshard_after_forward,
                    ..Gathering::default()
                },
                ..EngineOptions::default()
            };
            for world in [1, 2] {
                let what = format!(
                    "{prefetch_units} units, {prefetch_elements} elements, {forward_prefetch}, {backward_prefetch:?}, {reshard_after_forward}"
                );
                check(world, DType::F32, &options, &what);
            }
        }
    }
}

#[test]
fn forecasts_know_groups_of_ranks_that_are_replicas() {
    let options = || EngineOptions {
        strategy: Box::new(SHARDED),
        shard_group: Some(2),
        ..EngineOptions::default()
    };
    check(4, DType::F32, &options, "two groups of two");
}

#[test]
fn forecasts_know_what_lies_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    for sub_group_elements in [64, 500, 1 << 20] {
        for dtype in [DType::F32, DType::BF16] {
            for parameters in [Tier::Device, Tier::Disk] {
                let options = || EngineOptions {
                    strategy: Box::new(Offloaded {
                        strategy: Box::new(SHARDED),
                        parameters,
                        optimizer_state: Tier::Disk,
                    }),
                    disk: Some(DiskOptions {
                        folder: folder.path().into(),
                        sub_group_elements,
                    }),
                    ..EngineOptions::default()
                };
                let what = format!("parameters on {parameters:?}, groups of {sub_group_elements}");
                check(2, dtype, &options, &what);
            }
        }
    }
}
