//! Fully sharded data parallelism in PyTorch FSDP's terms: units, wrap policies, sharding strategies.
//!
//! This crate will say FSDP's vocabulary on top of `sconce-zero`'s partitioned state. It is empty in this version: no
//! unit, policy or strategy of FSDP exists yet, and `sconce-core` offers none. It must not know configuration files or
//! data loaders.

#![forbid(unsafe_code)]
