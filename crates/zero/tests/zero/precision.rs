//! Parameters in bf16 and f16 with f32 masters.

use super::oracle::{ROWS, batch, model_of_dtype};
use super::zero_stages::{EVERYTHING, STAGES, options};
use super::{bits, engine, on_ranks};
use candle_core::{DType, Tensor};
use sconce_zero::{AdamW, DataParallel, DiskOptions, EngineOptions, Offloaded, ParameterSet, ShardingStrategy, Tier};

/// What a run is compared by: losses, norms, and the model's values, as bits.
pub(crate) type Run = (Vec<u32>, Vec<u64>, Vec<u32>);

/// Trains on micro-batches of which there are as many whatever the world: each rank takes its share of them.
pub(crate) fn train(
    world: usize,
    micro_batches: usize,
    dtype: DType,
    options: &(dyn Fn() -> EngineOptions + Sync),
) -> Vec<Run> {
    on_ranks(world, |communicator| {
        let engine = engine(&communicator, options());
        let model = model_of_dtype(&engine, dtype);
        engine.set_optimizer(Box::new(AdamW::default())).unwrap();
        let own = micro_batches / world;
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..5 {
            let (rows, targets) = batch(step);
            for micro in 0..own {
                let size = ROWS / micro_batches;
                let part = |tensor: &Tensor| {
                    let start = (micro * world + communicator.rank()) * size;
                    tensor.narrow(0, start, size).unwrap().to_dtype(dtype).unwrap()
                };
                let loss = (model.loss(&part(&rows), &part(&targets)) / own as f64).unwrap();
                engine.backward(&loss, micro + 1 == own).unwrap();
                let loss = loss.to_dtype(DType::F32).unwrap().to_scalar::<f32>().unwrap();
                losses.push(loss.to_bits());
            }
            norms.push(engine.clip_grad_norm(0.5).unwrap().to_bits());
            engine.step(1e-2).unwrap();
            engine.zero_grad();
        }
        let wide = |tensor: &Tensor| super::flat(&tensor.to_dtype(DType::F32).unwrap());
        let values: Vec<f32> = engine
            .tensors(true)
            .unwrap()
            .iter()
            .flat_map(|(_, tensor)| wide(tensor))
            .collect();
        (losses, norms, bits(&values))
    })
}

#[test]
fn stages_give_the_bits_of_data_parallelism_in_bf16_and_f16() {
    let folder = tempfile::tempdir().unwrap();
    let disk = || EngineOptions {
        disk: Some(DiskOptions {
            folder: folder.path().into(),
            sub_group_elements: 50,
        }),
        ..options(Offloaded {
            strategy: Box::new(EVERYTHING),
            parameters: Tier::Disk,
            optimizer_state: Tier::Disk,
        })
    };
    for dtype in [DType::BF16, DType::F16] {
        for world in 1..=4 {
            let expected = train(world, world, dtype, &|| options(DataParallel));
            for stage in STAGES {
                let found = train(world, world, dtype, &|| options(stage));
                assert_eq!(found, expected, "{stage:?}, {dtype:?}, world {world}");
            }
            assert_eq!(
                train(world, world, dtype, &disk),
                expected,
                "disk, {dtype:?}, world {world}"
            );
        }
    }
}

#[test]
fn the_same_micro_batches_give_one_result_on_every_world_within_f32_rounding() {
    // Each micro-batch's gradient is rounded to bf16 by the model; from there on everything is f32.
    let expected = train(1, 4, DType::BF16, &|| options(DataParallel));
    for world in [2, 4] {
        for stage in STAGES {
            let found = train(world, 4, DType::BF16, &|| options(stage));
            let norm = |run: &Run, step: usize| f64::from_bits(run.1[step]);
            for step in 0..5 {
                let ratio = norm(&found[0], step) / norm(&expected[0], step);
                // A master that lies next to a rounding boundary may move one value by a bf16 step.
                let within = if step == 0 { 1e-6 } else { 2e-2 };
                assert!(
                    (ratio - 1.0).abs() < within,
                    "{stage:?}, world {world}, step {step}: {ratio}"
                );
            }
        }
    }
}

#[test]
fn updates_smaller_than_a_bf16_step_add_up_in_the_masters() {
    let options = || options(DataParallel);
    let runs = on_ranks(1, |communicator| {
        let engine = engine(&communicator, options());
        let vb = engine
            .var_builder(
                sconce_zero::Weights::Random { seed: 1 },
                DType::BF16,
                &candle_core::Device::Cpu,
            )
            .unwrap();
        let one = vb.get_with_hints(3, "w", candle_nn::Init::Const(1.0)).unwrap();
        engine.set_optimizer(super::sgd()).unwrap();
        let gradient = Tensor::new(&[1f32; 3], &candle_core::Device::Cpu)
            .unwrap()
            .to_dtype(DType::BF16)
            .unwrap();
        for _ in 0..64 {
            let loss = (&one * &gradient).unwrap().sum_all().unwrap();
            engine.backward(&loss, true).unwrap();
            engine.step(2f64.powi(-12)).unwrap();
            engine.zero_grad();
        }
        super::flat(&one.to_dtype(DType::F32).unwrap())
    });
    // 64 steps of 2^-12 are four steps of bf16 below 1; each alone would round to nothing.
    assert_eq!(runs[0], [1.0 - 2f32.powi(-6); 3]);
}

/// Everything in f32 but what a rule says.
#[test]
fn parameters_of_several_dtypes_train_in_one_model() {
    let run = |world, strategy: &(dyn Fn() -> Box<dyn ShardingStrategy> + Sync)| {
        on_ranks(world, |communicator| {
            let engine = engine(
                &communicator,
                EngineOptions {
                    strategy: strategy(),
                    ..EngineOptions::default()
                },
            );
            let vb = engine
                .var_builder(
                    sconce_zero::Weights::Random { seed: 1 },
                    DType::BF16,
                    &candle_core::Device::Cpu,
                )
                .unwrap();
            let model = sconce_zero::unit(vb, "layer", |vb| {
                let weight = vb.get_with_hints((5, 7), "weight", candle_nn::Init::Randn { mean: 0.0, stdev: 1.0 })?;
                let norm = vb
                    .to_dtype(DType::F32)
                    .get_with_hints(7, "norm", candle_nn::Init::Const(1.0))?;
                Ok((weight, norm))
            })
            .unwrap();
            engine.set_optimizer(Box::new(AdamW::default())).unwrap();
            for step in 0..3 {
                let rows = Tensor::from_vec(
                    super::gradient(10, step + communicator.rank()),
                    (2, 5),
                    &candle_core::Device::Cpu,
                );
                let rows = rows.unwrap().to_dtype(DType::BF16).unwrap();
                let loss = model.run(rows, |(weight, norm), rows| {
                    rows.matmul(weight)?
                        .to_dtype(DType::F32)?
                        .broadcast_mul(norm)?
                        .sqr()?
                        .mean_all()
                });
                engine.backward(&loss.unwrap(), true).unwrap();
                engine.step(1e-2).unwrap();
                engine.zero_grad();
            }
            engine
                .read(&ParameterSet::matching(|_| true), |scope| {
                    let wide = |name| Ok(bits(&super::flat(&scope.get(name)?.to_dtype(DType::F32)?)));
                    scope.names().map(wide).collect::<sconce_zero::Result<Vec<_>>>()
                })
                .unwrap()
        })
    };
    for world in 1..=3 {
        let expected = run(world, &|| Box::new(DataParallel));
        for stage in STAGES {
            assert_eq!(
                run(world, &move || Box::new(stage)),
                expected,
                "{stage:?}, world {world}"
            );
        }
    }
}

#[test]
fn gradients_that_travel_in_bf16_are_rounded_for_the_way_under_every_stage_alike() {
    let in_bf16 = |options: EngineOptions| EngineOptions {
        reduce_dtype: DType::BF16,
        ..options
    };
    for world in 1..=3 {
        let wide = train(world, world, DType::F32, &|| options(DataParallel));
        let expected = train(world, world, DType::F32, &|| in_bf16(options(DataParallel)));
        for stage in STAGES {
            let found = train(world, world, DType::F32, &|| in_bf16(options(stage)));
            assert_eq!(found, expected, "{stage:?}, world {world}");
        }
        let norms = |runs: &[Run]| f64::from_bits(runs[0].1[0]);
        let ratio = norms(&expected) / norms(&wide);
        assert!(
            ratio != 1.0 && (ratio - 1.0).abs() < 2f64.powi(-8),
            "world {world}: {ratio}"
        );
    }
}

#[test]
fn floats_are_converted_at_the_border_of_units_and_nothing_else_is() {
    for strategy in [|| options(DataParallel), || options(EVERYTHING)] {
        for recompute in [sconce_zero::UnitPolicy::none(), sconce_zero::UnitPolicy::all()] {
            let options = EngineOptions {
                cast_inputs: true,
                output_dtype: Some(DType::F32),
                recompute,
                ..strategy()
            };
            let engine = engine(&sconce_collectives::single(), options);
            let vb = super::parity::builder(&engine).to_dtype(DType::BF16);
            let layer = sconce_zero::unit(vb, "layer", |vb| candle_nn::linear(7, 3, vb)).unwrap();
            engine.set_optimizer(Box::new(AdamW::default())).unwrap();
            let rows = super::parity::rows(0, 0);
            let ids = Tensor::new(&[1u32, 2], rows.device()).unwrap();
            let (output, same) = layer
                .run((rows, ids), |layer, (rows, ids)| {
                    assert_eq!((rows.dtype(), ids.dtype()), (DType::BF16, DType::U32));
                    Ok((candle_core::Module::forward(layer, &rows)?, ids))
                })
                .unwrap();
            assert_eq!((output.dtype(), same.dtype()), (DType::F32, DType::U32));
            engine
                .backward(&output.sqr().unwrap().mean_all().unwrap(), true)
                .unwrap();
            assert!(engine.grad_norm().unwrap() > 0.0);
        }
    }
}

#[test]
fn parameters_that_are_kept_in_f32_have_no_masters_and_are_one_however_they_are_asked_for() {
    let kept = EngineOptions {
        keep_in_f32: ParameterSet::matching(|parameter| parameter.name == "kept"),
        ..EngineOptions::default()
    };
    let engine = engine(&sconce_collectives::single(), kept);
    let source = sconce_zero::Weights::Random { seed: 3 };
    let vb = engine
        .var_builder(source, DType::BF16, &candle_core::Device::Cpu)
        .unwrap();
    let tensor = |name: &str, dtype| vb.get_with_hints_dtype(10, name, candle_nn::Init::Const(0.1), dtype);
    assert_eq!(tensor("kept", DType::BF16).unwrap().dtype(), DType::F32);
    assert_eq!(tensor("narrow", DType::BF16).unwrap().dtype(), DType::BF16);
    // Exactly the number, where 16 bits would have rounded it.
    assert_eq!(super::flat(&tensor("kept", DType::F16).unwrap()), [0.1; 10]);
    assert_eq!(
        tensor("kept", DType::BF16).unwrap().id(),
        tensor("kept", DType::F32).unwrap().id()
    );
    assert!(tensor("narrow", DType::F32).is_err());
    engine.set_optimizer(Box::new(AdamW::default())).unwrap();
    let memory = engine.memory();
    assert_eq!((memory.parameters, memory.masters), (10 * 4 + 10 * 2, 10 * 4));
}
