//! The `sconce` command: a thin shell over the library crates.
//!
//! This crate owns the terminal: it parses the command line, starts processes and words the messages. What it does with
//! tensors, models and configuration is all public in the crates below; nothing there is private to it.
//!
//! It is a library only so that its command line can be read by other programs; `sconce` itself is [`run`].
#![deny(unsafe_code)]

mod aligned_table;
mod bench;
mod byte_size;
mod checkpoint;
mod cli;
mod command_error;
mod completions;
mod config;
mod env;
mod estimate_memory;
mod launch;
mod man;
mod merge_weights;
mod own_ranks;
mod panic_report;
mod plan;
mod report;
mod self_test;
mod terminal;
mod to_fsdp2;

pub use cli::run;
