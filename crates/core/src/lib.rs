//! TODO

pub mod nn;
