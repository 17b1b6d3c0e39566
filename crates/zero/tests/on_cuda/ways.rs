//! Ways to keep an engine's state.

use candle_core::DType;
use sconce_zero::{
    DataParallel, DiskOptions, EngineOptions, Offloaded, OptimizerRule, PowerSgd, Result, ShardingStrategy,
    StateSlices, Tier, UnitPolicy, Update, ZeroStage,
};
use std::path::Path;

pub(crate) struct Way {
    pub(crate) name: &'static str,
    pub(crate) options: EngineOptions,
    /// Whether all of the state stays on the GPU while it is trained; `None` where none is there.
    pub(crate) is_on_gpu: Option<bool>,
}

/// Returns all of them, of which 0 to 3 are those with all state on the device.
pub(crate) fn ways(folder: &Path) -> Vec<Way> {
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
    let offloaded = |strategy: Box<dyn ShardingStrategy>, parameters, optimizer_state| EngineOptions {
        disk: disk(),
        ..of(Box::new(Offloaded {
            strategy,
            parameters,
            optimizer_state,
        }))
    };
    let way = |name, is_on_gpu, options| Way {
        name,
        options,
        is_on_gpu,
    };
    let data_parallel = || Box::new(DataParallel);
    vec![
        way("data parallelism", Some(true), of(data_parallel())),
        way("stage 1", Some(true), of(Box::new(ZeroStage::One))),
        way("stage 2", Some(true), of(Box::new(ZeroStage::Two))),
        way("stage 3", Some(true), of(Box::new(EVERYTHING))),
        way(
            "stage 3, computed again",
            Some(true),
            EngineOptions {
                recompute: UnitPolicy::all(),
                ..of(Box::new(EVERYTHING))
            },
        ),
        way(
            "stage 3 in replicas",
            Some(true),
            EngineOptions {
                shard_group: Some(1),
                ..of(Box::new(EVERYTHING))
            },
        ),
        way(
            "stage 3 in replicas, reduced in f16",
            Some(true),
            EngineOptions {
                shard_group: Some(1),
                reduce_dtype: DType::F16,
                ..of(Box::new(EVERYTHING))
            },
        ),
        way(
            "reduced in bf16",
            Some(true),
            EngineOptions {
                reduce_dtype: DType::BF16,
                ..of(data_parallel())
            },
        ),
        way(
            "compressed",
            Some(false),
            EngineOptions {
                power_sgd: Some(PowerSgd {
                    start_iteration: 2,
                    ..PowerSgd::default()
                }),
                ..of(data_parallel())
            },
        ),
        way(
            "state in the host's memory",
            None,
            offloaded(data_parallel(), Tier::Device, Tier::Host),
        ),
        way(
            "all in the host's memory",
            None,
            offloaded(Box::new(EVERYTHING), Tier::Host, Tier::Host),
        ),
        way(
            "state alone in the host's memory",
            Some(false),
            offloaded(Box::new(EVERYTHING), Tier::Device, Tier::Host),
        ),
        way(
            "parameters alone in the host's memory",
            Some(false),
            offloaded(Box::new(EVERYTHING), Tier::Host, Tier::Device),
        ),
        way(
            "state on disk",
            None,
            offloaded(data_parallel(), Tier::Device, Tier::Disk),
        ),
        way(
            "parameters on disk",
            None,
            offloaded(Box::new(EVERYTHING), Tier::Disk, Tier::Disk),
        ),
    ]
}

/// A rule of a user's, which the GPU knows nothing of: momentum by the book.
#[derive(Debug)]
pub(crate) struct Plain;

impl OptimizerRule for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["momentum"]
    }

    fn base_learning_rate(&self) -> f64 {
        0.01
    }

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn update(&self, update: &Update, parameter: &mut [f32], gradient: &[f32], state: StateSlices<'_>) {
        let [momentum, ..] = state.0;
        for ((value, gradient), momentum) in parameter.iter_mut().zip(gradient).zip(momentum) {
            *momentum = 0.5 * *momentum + gradient * update.gradient_scale;
            *value -= update.learning_rate as f32 * *momentum;
        }
    }
}
