//! Partitioned training state for candle: managed parameters, gradient buckets, optimizers over flat buffers.
//!
//! This crate owns what happens to a parameter between its creation and its update: who holds it, where its gradient
//! goes, who steps it. It knows nothing of wrap policies, configuration files or data loaders.
//!
//! A model built from [`Engine::var_builder`] is trainable without change:
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::Module;
//! use sconce_zero::{AdamW, Engine, EngineOptions, Weights};
//!
//! let engine = Engine::new(sconce_collectives::single(), EngineOptions::default())?;
//! let model = candle_nn::linear(4, 1, engine.var_builder(Weights::Random { seed: 1 }, DType::F32, &Device::Cpu)?)?;
//! engine.set_optimizer(Box::new(AdamW::default()))?;
//! let loss = model.forward(&Tensor::ones((2, 4), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
//! engine.backward(&loss, true)?;
//! let norm = engine.clip_grad_norm(1.0)?;
//! engine.step(1e-3)?;
//! # assert!(norm > 0.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(unsafe_code)]

mod anomaly;
mod autocast;
mod backward_scope;
mod bucket;
mod candle_optimizer;
mod device;
mod disk;
mod engine;
mod error;
mod gates;
mod gathered;
mod gradients;
mod hook;
mod layout;
mod local_tensor;
mod loss_guard;
mod loss_scale;
mod memory_forecast;
mod memory_report;
mod mesh;
mod norm;
mod optimizer;
mod options;
mod overflow;
mod parameter;
mod parameter_set;
mod parameters;
mod random;
mod recompute;
mod release;
mod saved_state;
mod shard;
mod spares;
mod stepper;
mod storage;
mod strategy;
mod trace;
mod unit;
mod unit_policy;
mod units;
mod var_builder;
mod weighted_mean;
mod weights;

pub use anomaly::Anomaly;
pub use autocast::Autocast;
pub use candle_optimizer::CandleOptimizer;
pub use disk::{DiskState, DiskValues};
pub use engine::Engine;
pub use error::{Error, Result};
pub use gathered::Gathered;
pub use gradients::PowerSgd;
pub use local_tensor::LocalTensor;
pub use loss_guard::Stepped;
pub use loss_scale::{BackoffScaling, HysteresisScaling, LossScaleState, LossScaler, LossScaling};
pub use memory_forecast::{MemoryForecast, PlannedParameter};
pub use memory_report::MemoryReport;
pub use norm::Norm;
pub use optimizer::{
    Adagrad, Adam, AdamW, Gradient, HalfMut, Lion, OptimizerRule, ParameterGroup, ParameterGroups, Sgd, StateSlices,
    StepKernel, Update, Values,
};
pub use options::{BackwardPrefetch, DiskOptions, EngineOptions, Gathering};
pub use parameter::ParameterInfo;
pub use parameter_set::ParameterSet;
pub use random::RandomState;
pub use saved_state::{EngineState, PlannedPiece, PowerSgdState, StatePiece, StateSource};
pub use storage::Elements;
pub use strategy::{DataParallel, Offloaded, Placement, Residence, ShardingStrategy, Tier, ZeroStage};
pub use unit::{Tensors, Unit, unit, unit_of_class};
pub use unit_policy::{UnitCandidate, UnitPolicy};
pub use weights::{ForeignWeights, MappedFile, WeightFiles, Weights};
