//! Training with parameters on a CUDA device, bit for bit as on the CPU.
//!
//! What computes with the parameters is an op of this test, which works on the host: all else is as in any training. So it
//! needs few of candle's kernels, and runs with the stand-in for CUDA's driver of `cargo xtask cuda-check --and-tests`,
//! which puts off what is asked of it as long as CUDA may.

#[cfg(not(feature = "cuda"))]
#[test]
fn training_on_a_cuda_device() {
    println!("skipped: this build is without the feature cuda");
}

#[cfg(feature = "cuda")]
mod cuda {
    use candle_core::backend::{BackendDevice, BackendStorage};
    use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor};
    use candle_nn::Init;
    use sconce_collectives::{Communicator, Options, shm};
    use sconce_zero::{
        AdamW, DataParallel, DiskOptions, Engine, EngineOptions, Offloaded, ParameterSet, ShardingStrategy, Tier, Unit,
        UnitPolicy, Weights, ZeroStage, unit,
    };
    use std::path::Path;
    use std::sync::Arc;

    /// Opens a GPU, or what stands for one; says so where there is neither.
    fn device() -> Option<Device> {
        match sconce_collectives::cuda::device_count() {
            Ok(count) if count > 0 => Some(Device::new_cuda_with_stream(0).unwrap()),
            _ => {
                println!("skipped: no driver of CUDA's is here, nor its stand-in");
                None
            }
        }
    }

    /// A number that depends on every element of a parameter, and a gradient of its shape that does.
    struct Probe;

    fn coefficient(element: usize) -> f32 {
        (element as f32 * 0.37).sin()
    }

    fn probed(values: &CpuStorage) -> CpuStorage {
        let wide: Vec<f32> = match values {
            CpuStorage::F32(values) => values.clone(),
            CpuStorage::BF16(values) => values.iter().map(|value| value.to_f32()).collect(),
            _ => panic!("parameters are f32 or bf16"),
        };
        let sum = wide
            .iter()
            .enumerate()
            .map(|(element, value)| value * coefficient(element));
        CpuStorage::F32(vec![sum.sum()])
    }

    impl CustomOp1 for Probe {
        fn name(&self) -> &'static str {
            "probe"
        }

        fn cpu_fwd(&self, storage: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
            Ok((probed(storage), Shape::from(())))
        }

        fn cuda_fwd(&self, storage: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
            let probed = probed(&storage.to_cpu_storage()?);
            Ok((storage.device().storage_from_cpu_storage(&probed)?, Shape::from(())))
        }

        fn bwd(&self, parameter: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
            // Read now, so that parameters must be there in the backward.
            let wide = parameter.detach().to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
            let wide = wide.flatten_all()?.to_vec1::<f32>()?;
            let gradient = wide.iter().enumerate();
            let gradient: Vec<f32> = gradient
                .map(|(element, value)| 0.5 * value + coefficient(element))
                .collect();
            let gradient = Tensor::from_vec(gradient, parameter.shape(), &Device::Cpu)?;
            let gradient = gradient.to_dtype(parameter.dtype())?;
            gradient.to_device(parameter.device()).map(Some)
        }
    }

    type Layer = Unit<[Tensor; 2]>;

    fn layer(vb: candle_nn::VarBuilder<'_>, name: &str) -> Result<Layer> {
        unit(vb, name, |vb| {
            Ok([random(&vb, (13, 7), "weight")?, random(&vb, 5, "bias")?])
        })
    }

    fn random(vb: &candle_nn::VarBuilder<'_>, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        vb.get_with_hints(shape, name, Init::Randn { mean: 0.0, stdev: 0.5 })
    }

    fn ways(folder: &Path) -> Vec<(&'static str, EngineOptions)> {
        const EVERYTHING: ZeroStage = ZeroStage::Three {
            persistence_threshold: 0,
        };
        let of = |strategy: Box<dyn ShardingStrategy>| EngineOptions {
            strategy,
            first_bucket_bytes: 64,
            bucket_bytes: 400,
            ..EngineOptions::default()
        };
        let disk = || {
            Some(DiskOptions {
                folder: folder.into(),
                sub_group_elements: 50,
            })
        };
        let on_disk = |strategy: Box<dyn ShardingStrategy>, parameters| EngineOptions {
            disk: disk(),
            ..of(Box::new(Offloaded {
                strategy,
                parameters,
                optimizer_state: Tier::Disk,
            }))
        };
        vec![
            ("data parallelism", of(Box::new(DataParallel))),
            ("stage 1", of(Box::new(ZeroStage::One))),
            ("stage 2", of(Box::new(ZeroStage::Two))),
            ("stage 3", of(Box::new(EVERYTHING))),
            (
                "stage 3, computed again",
                EngineOptions {
                    recompute: UnitPolicy::all(),
                    ..of(Box::new(EVERYTHING))
                },
            ),
            ("state on disk", on_disk(Box::new(DataParallel), Tier::Device)),
            ("parameters on disk", on_disk(Box::new(EVERYTHING), Tier::Disk)),
        ]
    }

    /// Trains three units and a parameter that two of them share; returns losses and values as bits.
    fn train(communicator: &Arc<dyn Communicator>, options: EngineOptions, dtype: DType, device: &Device) -> Vec<u32> {
        let engine = Engine::new(Arc::clone(communicator), options).unwrap();
        let vb = engine.var_builder(Weights::Random { seed: 5 }, dtype, device).unwrap();
        let layers = ["a", "b", "a"].map(|name| layer(vb.clone(), name).unwrap());
        let outside = random(&vb, 11, "outside").unwrap();
        engine.set_optimizer(Box::new(AdamW::default())).unwrap();
        let edit = engine.edit(&ParameterSet::all(), 0, |scope| {
            let values = scope.get("b.weight")?.to_device(&Device::Cpu)?;
            scope.set("b.weight", &(values.to_dtype(DType::F32)? * 0.5)?)
        });
        edit.unwrap();
        let mut trace = Vec::new();
        for _ in 0..3 {
            for micro in 0..2 {
                let mut loss = outside.apply_op1(Probe).unwrap();
                for layer in &layers {
                    let run = |[weight, bias]: &[Tensor; 2], loss: Tensor| {
                        loss + (weight.apply_op1(Probe)? + bias.apply_op1(Probe)?)?
                    };
                    loss = layer.run(loss, run).unwrap();
                }
                engine.backward(&loss, micro == 1).unwrap();
                let loss: f32 = loss.to_scalar().unwrap();
                trace.push(loss.to_bits());
            }
            trace.push((engine.clip_grad_norm(1.0).unwrap() as f32).to_bits());
            engine.step(0.01).unwrap();
            engine.zero_grad();
        }
        for (_, tensor) in engine.tensors(true).unwrap() {
            let tensor = tensor.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
            let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(values.iter().all(|value| value.is_finite()));
            trace.extend(values.iter().map(|value| value.to_bits()));
        }
        for tensor in engine.local_tensors().unwrap() {
            let values = tensor.values.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
            trace.extend(values.iter().map(|value| value.to_bits()));
        }
        trace
    }

    #[test]
    fn every_way_to_keep_state_has_the_bits_of_the_cpu() {
        if device().is_none() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        for (number, (what, _)) in ways(folder.path()).into_iter().enumerate() {
            for dtype in [DType::F32, DType::BF16] {
                for world in 1..=2 {
                    let run = |is_on_gpu: bool| -> Vec<Vec<u32>> {
                        let rank = |communicator: Arc<dyn Communicator>| {
                            let device = device().filter(|_| is_on_gpu).unwrap_or(Device::Cpu);
                            let (_, options) = ways(folder.path()).swap_remove(number);
                            train(&communicator, options, dtype, &device)
                        };
                        let groups = shm::threads(world, &Options::default()).unwrap();
                        std::thread::scope(|scope| {
                            let ranks = groups.into_iter().map(|group| scope.spawn(|| rank(group)));
                            let ranks = Vec::from_iter(ranks).into_iter();
                            ranks.map(|rank| rank.join().unwrap()).collect()
                        })
                    };
                    assert_eq!(run(true), run(false), "{what}, {dtype:?}, world {world}");
                }
            }
        }
    }

    #[test]
    fn a_released_parameter_is_an_error_of_every_op() {
        let Some(device) = device() else { return };
        let strategy = Box::new(ZeroStage::Three {
            persistence_threshold: 0,
        });
        let options = EngineOptions {
            strategy,
            ..EngineOptions::default()
        };
        let engine = Engine::new(sconce_collectives::single(), options).unwrap();
        let vb = engine
            .var_builder(Weights::Random { seed: 5 }, DType::F32, &device)
            .unwrap();
        let layer = layer(vb, "layer").unwrap();
        let [weight, _] = layer.module();
        let other = Tensor::zeros((13, 7), DType::F32, &device).unwrap();
        let attempts = [
            weight + &other,
            other.matmul(&weight.t().unwrap()),
            weight.sqr(),
            weight * 2.0,
            weight.to_dtype(DType::BF16),
            weight.t().unwrap().contiguous(),
            weight.sum_all(),
            Tensor::cat(&[weight, &other], 0),
            weight.narrow(0, 1, 1).unwrap().force_contiguous(),
        ];
        for (number, attempt) in attempts.into_iter().enumerate() {
            let message = attempt.unwrap_err().to_string();
            println!("{number}: {message}");
            assert!(!message.contains("NOT_FOUND"), "{number}: refused for want of a kernel");
        }
    }

    #[test]
    fn a_device_with_a_stream_in_each_thread_is_refused() {
        if device().is_none() {
            return;
        }
        let engine = Engine::new(sconce_collectives::single(), EngineOptions::default()).unwrap();
        let device = Device::new_cuda(0).unwrap();
        let vb = engine
            .var_builder(Weights::Random { seed: 5 }, DType::F32, &device)
            .unwrap();
        let message = vb.get(3, "weight").unwrap_err().to_string();
        assert!(message.contains("new_cuda_with_stream"), "{message}");
    }
}
