//! One program under every way to keep parameters: where they lie must not change a bit of what it comes to.

use super::{bits, engine, flat, on_ranks, values};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use sconce_zero::{
    BackwardPrefetch, DataParallel, Engine, EngineOptions, Gathering, ParameterSet, Sgd, ShardingStrategy, UnitPolicy,
    Weights, ZeroStage,
};
use std::collections::HashMap;

/// Columns of every input.
pub(crate) const WIDTH: usize = 7;
const STEPS: usize = 4;
const RATE: f64 = 0.1;

/// Stage 3 without a parameter that stays whole.
pub(crate) const SHARDED: ZeroStage = ZeroStage::Three {
    persistence_threshold: 0,
};

/// Ways to gather: when a unit runs, a little ahead, everything ahead, everything ahead for which there is no room, one unit
/// ahead after each backward, forwards only, and once for both passes.
pub(crate) fn gatherings() -> [Gathering; 7] {
    let gathering = |prefetch_elements, max_live_elements| Gathering {
        prefetch_elements,
        max_live_elements,
        ..Gathering::default()
    };
    let everything = gathering(usize::MAX, usize::MAX);
    [
        gathering(0, usize::MAX),
        gathering(80, usize::MAX),
        everything.clone(),
        gathering(usize::MAX, 100),
        Gathering {
            prefetch_units: 1,
            forward_prefetch: false,
            backward_prefetch: BackwardPrefetch::Post,
            ..everything.clone()
        },
        Gathering {
            backward_prefetch: BackwardPrefetch::None,
            ..everything.clone()
        },
        Gathering {
            prefetch_units: 1,
            reshard_after_forward: false,
            ..everything
        },
    ]
}

/// A model, and its loss on some rows.
pub(crate) struct Case<M> {
    build: fn(VarBuilder<'_>) -> Result<M>,
    loss: fn(&M, &Tensor) -> Result<Tensor>,
    frozen: fn(&str) -> bool,
    find_unused_parameters: bool,
}

impl<M> Case<M> {
    /// A case in which everything is trained.
    pub(crate) fn new(build: fn(VarBuilder<'_>) -> Result<M>, loss: fn(&M, &Tensor) -> Result<Tensor>) -> Self {
        Self {
            build,
            loss,
            frozen: |_| false,
            find_unused_parameters: false,
        }
    }

    /// Allows parameters without a gradient.
    pub(crate) fn unused(self) -> Self {
        Self {
            find_unused_parameters: true,
            ..self
        }
    }

    /// Freezes the parameters whose names hold.
    pub(crate) fn frozen(self, frozen: fn(&str) -> bool) -> Self {
        Self { frozen, ..self }
    }

    /// Checks that training with sharded parameters has the bits of data parallelism, and those the bits of plain
    /// variables on one rank.
    pub(crate) fn check(&self) {
        let runs = assert_sharding_changes_nothing(
            || Box::new(DataParallel),
            || EngineOptions {
                frozen: ParameterSet::matching({
                    let frozen = self.frozen;
                    move |parameter| frozen(&parameter.name)
                }),
                find_unused_parameters: self.find_unused_parameters,
                ..EngineOptions::default()
            },
            |engine| self.train(engine),
        );
        assert_eq!(runs[0], self.train_plain(), "one rank and plain variables");
    }

    /// Checks that training with sharded parameters has the bits of data parallelism whose units these are, and with these
    /// parts computed again.
    pub(crate) fn check_policies(&self, units: &UnitPolicy, recompute: &UnitPolicy) {
        for world in 1..=3 {
            let run = |options: &(dyn Fn() -> EngineOptions + Sync)| {
                on_ranks(world, |communicator| self.train(&engine(&communicator, options())))
            };
            let expected = run(&EngineOptions::default);
            let strategies: [fn() -> Box<dyn ShardingStrategy>; 2] = [|| Box::new(DataParallel), || Box::new(SHARDED)];
            for strategy in strategies {
                let found = run(&|| EngineOptions {
                    strategy: strategy(),
                    units: units.clone(),
                    recompute: recompute.clone(),
                    ..EngineOptions::default()
                });
                assert_eq!(found, expected, "world {world}");
            }
        }
    }

    /// Trains through an engine; returns losses and final values as bits.
    fn train(&self, engine: &Engine) -> Vec<u32> {
        let model = (self.build)(builder(engine)).unwrap();
        engine.set_optimizer(Box::new(Sgd::default())).unwrap();
        let mut trace = Vec::new();
        for step in 0..STEPS {
            let loss = (self.loss)(&model, &rows(step, engine.communicator().rank())).unwrap();
            engine.backward(&loss, true).unwrap();
            engine.step(RATE).unwrap();
            engine.zero_grad();
            trace.extend(bits(&flat(&loss)));
        }
        trace.extend(bits(&values(engine)));
        trace
    }

    /// Trains variables with candle's own backward.
    fn train_plain(&self) -> Vec<u32> {
        let source = engine(&sconce_collectives::single(), EngineOptions::default());
        (self.build)(builder(&source)).unwrap();
        let mut tensors = HashMap::new();
        let mut variables = Vec::new();
        for (name, tensor) in source.tensors(true).unwrap() {
            let variable = Var::from_tensor(&tensor).unwrap();
            if (self.frozen)(&name) {
                tensors.insert(name, tensor);
            } else {
                tensors.insert(name.clone(), variable.as_tensor().clone());
                variables.push(variable);
            }
        }
        let names: std::collections::BTreeMap<_, _> = tensors.clone().into_iter().collect();
        let model = (self.build)(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu)).unwrap();
        let mut trace = Vec::new();
        for step in 0..STEPS {
            let loss = (self.loss)(&model, &rows(step, 0)).unwrap();
            let gradients = loss.backward().unwrap();
            for variable in &variables {
                if let Some(gradient) = gradients.get(variable) {
                    let value = (variable.as_tensor() - (gradient * RATE).unwrap()).unwrap();
                    variable.set(&value).unwrap();
                }
            }
            trace.extend(bits(&flat(&loss)));
        }
        trace.extend(names.values().flat_map(|tensor| bits(&flat(tensor))));
        trace
    }
}

/// Runs a program on 1 to 3 ranks with the parameters as `baseline` keeps them, and with sharded ones however they are
/// gathered; checks that it reports the same bits, of which all are numbers. Returns rank 0's by world.
pub(crate) fn assert_sharding_changes_nothing(
    baseline: impl Fn() -> Box<dyn ShardingStrategy> + Sync,
    options: impl Fn() -> EngineOptions + Sync,
    program: impl Fn(&Engine) -> Vec<u32> + Sync,
) -> Vec<Vec<u32>> {
    let mut reports = Vec::new();
    for world in 1..=3 {
        let run_on = |emulate_device: bool,
                      strategy: &(dyn Fn() -> Box<dyn ShardingStrategy> + Sync),
                      gathering: &Gathering,
                      recompute: &UnitPolicy| {
            on_ranks(world, |communicator| {
                let engine = engine(
                    &communicator,
                    EngineOptions {
                        strategy: strategy(),
                        gathering: gathering.clone(),
                        recompute: recompute.clone(),
                        emulate_device,
                        ..options()
                    },
                );
                let report = program(&engine);
                (report, engine.memory())
            })
        };
        let run = |strategy: &(dyn Fn() -> Box<dyn ShardingStrategy> + Sync), gathering: &_, recompute: &_| {
            run_on(false, strategy, gathering, recompute)
        };
        let (all, none) = (UnitPolicy::all(), UnitPolicy::none());
        let expected = run(&baseline, &Gathering::default(), &none);
        let is_number = |bits: &u32| f32::from_bits(*bits).is_finite();
        assert!(expected.iter().all(|(report, _)| report.iter().all(is_number)));
        assert_eq!(expected[0].1.gathered_peak, 0);
        let again = run(&baseline, &Gathering::default(), &all);
        for (found, expected) in again.iter().zip(&expected) {
            assert_eq!(found.0, expected.0, "world {world}, recomputed");
        }
        let sharded: fn() -> Box<dyn ShardingStrategy> = || Box::new(SHARDED);
        for strategy in [&baseline as &(dyn Fn() -> _ + Sync), &sharded] {
            for recompute in [&none, &all] {
                let emulated = run_on(true, strategy, &Gathering::default(), recompute);
                for (found, expected) in emulated.iter().zip(&expected) {
                    assert_eq!(
                        found.0, expected.0,
                        "world {world}, emulated device, recomputed {recompute:?}"
                    );
                }
            }
        }
        let runs = gatherings().map(|gathering| [(gathering.clone(), &none), (gathering, &all)]);
        for (gathering, recompute) in runs.into_iter().flatten() {
            let found = run(&sharded, &gathering, recompute);
            for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(
                    found.0, expected.0,
                    "world {world}, rank {rank}, {gathering:?}, recomputed {recompute:?}"
                );
                assert_eq!(found.1.gathered, 0, "world {world}, rank {rank}, {gathering:?}");
                assert!(found.1.gathered_peak > 0, "nothing was sharded");
            }
        }
        reports.extend(expected.into_iter().next().map(|(report, _)| report));
    }
    reports
}

pub(crate) fn builder(engine: &Engine) -> VarBuilder<'static> {
    engine
        .var_builder(Weights::Random { seed: 3 }, DType::F32, &Device::Cpu)
        .unwrap()
}

/// Asks for a matrix or vector of moderate values.
pub(crate) fn weight(vb: &VarBuilder<'_>, shape: impl Into<candle_core::Shape>, name: &str) -> Result<Tensor> {
    vb.get_with_hints(shape, name, Init::Randn { mean: 0.0, stdev: 0.4 })
}

/// Five rows for a step of a rank.
pub(crate) fn rows(step: usize, rank: usize) -> Tensor {
    let value = |i: usize| (0.7 * (i + 31 * step + 57 * rank) as f32).sin();
    Tensor::from_vec((0..5 * WIDTH).map(value).collect(), (5, WIDTH), &Device::Cpu).unwrap()
}

/// The mean of squares.
pub(crate) fn mean_square(tensor: &Tensor) -> Result<Tensor> {
    tensor.sqr()?.mean_all()
}
