//! Fully sharded data parallelism in PyTorch FSDP's terms: sharding strategies, wrap policies, prefetching.
//!
//! This crate owns FSDP's vocabulary: Accelerate's switches, their names, defaults and rules, and how `sconce-zero`'s engine
//! is told of them. It moves no data itself, and must not know environment variables, configuration files or data loaders.
//!
//! [`FullyShardedOptions`] is what is said, [`FullySharded`] what comes of it:
//!
//! ```
//! use sconce_fsdp::{FsdpStrategy, FullyShardedOptions, WrapPolicy};
//! use sconce_zero::{Engine, EngineOptions};
//!
//! let options = FullyShardedOptions {
//!     sharding_strategy: Some(FsdpStrategy::FullShard),
//!     auto_wrap_policy: Some(WrapPolicy::transformer_based(["LlamaDecoderLayer"])),
//!     ..FullyShardedOptions::default()
//! };
//! let run = options.resolve()?;
//! let (ranks, ranks_per_host) = (1, 1);
//! let options = run.engine_options(EngineOptions::default(), ranks, ranks_per_host)?;
//! let engine = Engine::new(sconce_collectives::single(), options)?;
//! # assert_eq!(engine.communicator().size(), 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! In reading order: the values, each with FSDP's names ([`Named`], [`FsdpVersion`], [`FsdpStrategy`],
//! [`ReshardAfterForward`], [`BackwardPrefetch`], [`StateDictType`], [`PrecisionPolicy`]); which parts of a model are sharded
//! together ([`WrapPolicy`], [`IgnoredModules`]); and all of them as one.

#![forbid(unsafe_code)]

mod error;
mod fully_sharded;
mod ignored_modules;
mod names;
mod options;
mod placement;
mod precision_policy;
mod prefetch;
mod reshard;
mod state_dict_type;
mod strategy;
mod version;
mod wrap_policy;

pub use error::{Error, Result};
pub use fully_sharded::FullySharded;
pub use ignored_modules::IgnoredModules;
pub use names::Named;
pub use options::FullyShardedOptions;
pub use precision_policy::PrecisionPolicy;
pub use reshard::ReshardAfterForward;
pub use sconce_zero::BackwardPrefetch;
pub use state_dict_type::StateDictType;
pub use strategy::FsdpStrategy;
pub use version::FsdpVersion;
pub use wrap_policy::{AutoWrapPolicy, MIN_NUM_PARAMS, WrapPolicy};
