//! Distributed training for candle: change about four lines, start with `sconce launch`.
//!
//! This crate owns the [`Accelerator`] and everything around the training loop: configuration, data sharding,
//! schedules, training-grade layers ([`nn`]). It knows nothing of the terminal. [`data`] says what can be read, and how.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::Module;
//! use sconce_core::{AdamW, DataLoader, LinearSchedule, TensorDataset, Weights};
//!
//! let acc = sconce_core::accelerator()?; // reads what `sconce launch` says
//! let model = candle_nn::linear(3, 1, acc.var_builder(Weights::Random { seed: 1 })?)?;
//! let data = TensorDataset::new(vec![Tensor::ones((8, 3), DType::F32, &Device::Cpu)?])?;
//! let schedule = LinearSchedule { warmup_steps: 1, total_steps: 4 };
//! let (mut optimizer, mut loader, mut scheduler) =
//!     acc.prepare(AdamW::default(), DataLoader::new(data, 2), schedule)?;
//! for batch in &mut loader {
//!     let loss = model.forward(&batch?[0])?.sqr()?.mean_all()?;
//!     acc.backward(&loss)?;
//!     optimizer.step()?;
//!     scheduler.step()?;
//!     optimizer.zero_grad()?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(unsafe_code)]

mod accelerator;
mod accumulation;
mod agreement;
mod builder;
pub mod checkpoint;
mod chrome_trace;
mod clipping;
pub mod config;
pub mod data;
pub mod deepspeed;
mod device;
pub mod environment;
mod error;
mod executable_batch_size;
pub mod export;
pub mod failure_file;
pub mod fp8;
mod gradient_compression;
mod host_name;
mod join;
mod launch_threads;
mod local_sgd;
mod managed;
pub mod measure;
pub mod memory_estimate;
mod metrics;
mod nearest;
mod nested;
pub mod nn;
mod objects;
mod optimizer;
mod processes;
pub mod schedule;
pub mod self_test;
mod settings;
mod shape_check;
mod spent_losses;
mod split;
mod tensors;
mod text_file;
mod together;
pub mod trackers;

pub use accelerator::Accelerator;
pub use builder::{AcceleratorBuilder, accelerator};
pub use checkpoint::{Checkpoint, CheckpointError, Checkpoints, HookHandle, LoadOptions, Loaded, Stateful};
pub use chrome_trace::{ChromeTrace, Profile};
pub use data::{DataLoader, Dataset, IterableDataset, PreparedLoader, TensorDataset};
pub use device::DeviceRequest;
pub use error::{Error, Result};
pub use executable_batch_size::is_out_of_memory;
pub use gradient_compression::GradientCompression;
pub use join::Joined;
pub use launch_threads::launch_threads;
pub use local_sgd::LocalSgd;
pub use nested::{Nested, Part, Parts};
pub use optimizer::Optimizer;
pub use schedule::{LinearSchedule, Schedule, ScheduleAdvance, ScheduleStepping, Scheduler};
pub use settings::{BatchPlan, Clipping, RunSettings, Sharding, Synchronisation};
pub use split::Split;

pub use sconce_collectives::{Communicator, ReduceOp, Traffic, World};
pub use sconce_fsdp::{
    BackwardPrefetch, FsdpStrategy, FsdpVersion, FullySharded, FullyShardedOptions, IgnoredModules, PrecisionPolicy,
    ReshardAfterForward, StateDictType, WrapPolicy,
};
pub use sconce_zero::{
    Adagrad, Adam, AdamW, Anomaly, Autocast, BackoffScaling, CandleOptimizer, DataParallel, DiskOptions, Engine,
    EngineOptions, ForeignWeights, Gathered, Gathering, HysteresisScaling, Lion, LocalTensor, LossScaling,
    MemoryReport, Offloaded, OptimizerRule, ParameterGroups, ParameterInfo, ParameterSet, Placement, PowerSgd,
    RandomState, Residence, Sgd, ShardingStrategy, Tensors, Tier, Unit, UnitCandidate, UnitPolicy, WeightFiles,
    Weights, ZeroStage, unit, unit_of_class,
};
