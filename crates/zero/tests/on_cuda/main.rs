//! Training with parameters on a CUDA device, bit for bit as on the CPU.
//!
//! What computes with the parameters is an op of this test, which works on the host: all else is as in any training. So it
//! needs few of candle's kernels, and runs with the stand-in for CUDA's driver of `cargo xtask cuda-check --and-tests`,
//! which puts off what is asked of it as long as CUDA may. Kernels of the engine's run there as they are.

#[cfg(not(feature = "cuda"))]
#[test]
fn training_on_a_cuda_device() {
    println!("skipped: this build is without the feature cuda");
}

#[cfg(feature = "cuda")]
mod probe;
#[cfg(feature = "cuda")]
mod training;
#[cfg(feature = "cuda")]
mod ways;

#[cfg(feature = "cuda")]
mod cuda {
    use super::probe::{EveryNumber, device, layer};
    use super::training::{Course, Outcome, train};
    use super::ways::{Plain, Way, ways};
    use candle_core::{DType, Device, Tensor};
    use sconce_collectives::{Communicator, Options, shm};
    use sconce_zero::{
        Adagrad, Adam, AdamW, Elements, Engine, EngineOptions, Lion, Norm, OptimizerRule, ParameterSet, Sgd, Weights,
        ZeroStage,
    };
    use std::path::Path;
    use std::sync::Arc;

    type Rule = Box<dyn OptimizerRule>;

    /// Trains on `world` ranks, on the GPU and on the CPU; checks that all bits agree, and returns what came of it on the
    /// GPU.
    fn compare(folder: &Path, way: usize, course: &Course, world: usize) -> Vec<Outcome> {
        let what = ways(folder).swap_remove(way).name;
        let run = |is_on_gpu: bool| -> Vec<Outcome> {
            let rank = |communicator: Arc<dyn Communicator>| {
                let device = device().filter(|_| is_on_gpu).unwrap_or(Device::Cpu);
                let options = ways(folder).swap_remove(way).options;
                train(&communicator, options, course, &device)
            };
            let groups = shm::threads(world, &Options::default()).unwrap();
            std::thread::scope(|scope| {
                let ranks = groups.into_iter().map(|group| scope.spawn(|| rank(group)));
                let ranks = Vec::from_iter(ranks).into_iter();
                ranks.map(|rank| rank.join().unwrap()).collect()
            })
        };
        let (on_gpu, on_cpu) = (run(true), run(false));
        for (rank, (on_gpu, on_cpu)) in on_gpu.iter().zip(&on_cpu).enumerate() {
            assert_eq!(on_gpu.trace, on_cpu.trace, "{what}, {course:?}, rank {rank} of {world}");
            assert_eq!(on_cpu.accesses + on_cpu.accesses_in_training, 0, "nothing is on a GPU");
        }
        on_gpu
    }

    #[test]
    fn every_way_to_keep_state_has_the_bits_of_the_cpu_and_what_is_on_the_gpu_stays_there() {
        if device().is_none() {
            return;
        }
        // The stand-in's, for a device on which no state can lie.
        let has_unified_memory = std::env::var_os("STAND_IN_KEEPS_MEMORY_APART").is_none();
        let folder = tempfile::tempdir().unwrap();
        for (number, Way { name, is_on_gpu, .. }) in ways(folder.path()).into_iter().enumerate() {
            for dtype in [DType::F32, DType::BF16] {
                for world in 1..=2 {
                    let course = Course {
                        dtype,
                        ..Course::default()
                    };
                    for outcome in compare(folder.path(), number, &course, world) {
                        let what = format!("{name}, {dtype:?}, world {world}");
                        // State that was looked at afterwards is counted, or the count would say nothing.
                        assert_eq!(
                            outcome.accesses > 0,
                            has_unified_memory && is_on_gpu.is_some(),
                            "{what}"
                        );
                        if is_on_gpu == Some(true) {
                            assert_eq!(outcome.accesses_in_training, 0, "{what}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_rule_has_the_bits_of_the_cpu_and_those_of_this_crate_run_on_the_gpu() {
        if device().is_none() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let rules: [(fn() -> Rule, bool); 10] = [
            (|| Box::new(AdamW::default()), true),
            (
                || {
                    Box::new(AdamW {
                        amsgrad: true,
                        bias_correction: false,
                        ..AdamW::default()
                    })
                },
                true,
            ),
            (
                || {
                    Box::new(Adam {
                        weight_decay: 0.1,
                        ..Adam::default()
                    })
                },
                true,
            ),
            (
                || {
                    Box::new(Adam {
                        amsgrad: true,
                        weight_decay: 0.1,
                        ..Adam::default()
                    })
                },
                true,
            ),
            (
                || {
                    Box::new(Sgd {
                        weight_decay: 0.1,
                        ..Sgd::default()
                    })
                },
                true,
            ),
            (
                || {
                    Box::new(Sgd {
                        momentum: 0.9,
                        dampening: 0.2,
                        ..Sgd::default()
                    })
                },
                true,
            ),
            (
                || {
                    Box::new(Sgd {
                        momentum: 0.9,
                        nesterov: true,
                        ..Sgd::default()
                    })
                },
                true,
            ),
            (
                || {
                    Box::new(Lion {
                        weight_decay: 0.1,
                        ..Lion::default()
                    })
                },
                true,
            ),
            (
                || {
                    Box::new(Adagrad {
                        initial_accumulator_value: 0.5,
                        learning_rate_decay: 0.1,
                        ..Adagrad::default()
                    })
                },
                true,
            ),
            (|| Box::new(Plain), false),
        ];
        for (rule, has_kernel) in rules {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                // Data parallelism, and all of it sharded.
                for way in [0, 3] {
                    let course = Course {
                        dtype,
                        rule,
                        ..Course::default()
                    };
                    for outcome in compare(folder.path(), way, &course, 2) {
                        assert_eq!(outcome.accesses_in_training == 0, has_kernel, "{course:?}, way {way}");
                    }
                }
            }
        }
    }

    #[test]
    fn norms_limits_and_overflow_have_the_bits_of_the_cpu() {
        if device().is_none() {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let large = Course {
            rows: 5000,
            ..Course::default()
        };
        let courses = [
            Course {
                norm: Norm::L1,
                ..large
            },
            large,
            Course {
                norm: Norm::L3,
                goes_on_after_clipping: true,
                ..Course::default()
            },
            Course {
                norm: Norm::Infinity,
                limit: Some(0.25),
                ..large
            },
            Course {
                limit: Some(0.25),
                goes_on_after_clipping: true,
                overflow_in: Some(1),
                ..Course::default()
            },
            Course {
                overflow_in: Some(1),
                ..Course::default()
            },
            Course {
                overflow_in: Some(0),
                has_norm: false,
                ..Course::default()
            },
            Course {
                left_out_in: Some(1),
                dtype: DType::BF16,
                ..Course::default()
            },
        ];
        for course in courses {
            for way in [0, 1, 2, 3] {
                for outcome in compare(folder.path(), way, &course, 2) {
                    assert_eq!(outcome.accesses_in_training, 0, "{course:?}, way {way}");
                    assert_eq!(
                        outcome.skipped,
                        u64::from(course.overflow_in.is_some()),
                        "{course:?}, way {way}"
                    );
                }
            }
        }
    }

    #[test]
    fn numbers_of_every_magnitude_are_rounded_and_widened_as_on_the_cpu() {
        let Some(gpu) = device() else { return };
        for dtype in [DType::BF16, DType::F16] {
            let (on_gpu, on_cpu) = (rounded(dtype, &gpu), rounded(dtype, &Device::Cpu));
            let differs = on_gpu.iter().zip(&on_cpu).position(|(on_gpu, on_cpu)| on_gpu != on_cpu);
            let numbers = differs.map(|at| (at, f32::from_bits(on_gpu[at]), f32::from_bits(on_cpu[at])));
            assert_eq!(numbers, None, "{dtype:?}: where, on the GPU, and on the CPU");
        }
    }

    /// Returns a parameter of this dtype and its state after a step that changes no master: masters are f32 on, between and
    /// next to the ties between all 16-bit numbers, gradients all of these numbers.
    fn rounded(dtype: DType, device: &Device) -> Vec<u32> {
        let of_high_half = |high: u32| {
            let lows = [0, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001];
            lows.map(|low| f32::from_bits(high << 16 | low))
        };
        // Denormal f16 are farther apart than any two of these.
        let denormals = (0..2u32 << 10).flat_map(|halves| {
            let tie = halves as f32 / 2.0 * 2f32.powi(-24);
            [tie.next_down(), tie, tie.next_up(), -tie]
        });
        let values = (0..1 << 16).flat_map(of_high_half).chain(denormals);
        let values = Vec::from_iter(values.filter(|value| value.is_finite()));
        let count = values.len();
        let engine = Engine::new(sconce_collectives::single(), EngineOptions::default()).unwrap();
        let vb = engine.var_builder(Weights::Random { seed: 5 }, dtype, device).unwrap();
        let parameter = vb.get(count, "weight").unwrap();
        engine
            .set_optimizer(Box::new(Sgd {
                momentum: 0.5,
                ..Sgd::default()
            }))
            .unwrap();
        let set = engine.edit(&ParameterSet::all(), 0, |scope| {
            scope.set("weight", &Tensor::new(&values[..], &Device::Cpu)?)
        });
        set.unwrap();
        let loss = parameter.apply_op1(EveryNumber).unwrap();
        engine.backward(&loss, true).unwrap();
        engine.step(0.0).unwrap();
        let parameter = parameter.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
        let values = parameter.to_vec1::<f32>().unwrap();
        let mut bits = Vec::from_iter(values.iter().map(|value| value.to_bits()));
        let visited = engine.visit_state(&mut |piece| {
            let Elements::F32(values) = piece.values else {
                panic!("what is trained has f32 state")
            };
            bits.extend(values.iter().map(|value| value.to_bits()));
            Ok(())
        });
        visited.unwrap();
        assert_eq!(bits.len(), 3 * count);
        bits
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
        let layer = layer(vb, "layer", 13).unwrap();
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
