//! FSDP's switches: names, defaults, what goes together, and what the engine is told.

mod engine;
mod names;
mod options;
mod wrap_policies;
