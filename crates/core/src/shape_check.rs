//! The debug mode's look at what all ranks give to a collective, before it runs.
//!
//! Collectives compare types and numbers of elements always. Shapes of one size, as [2, 3] and [3, 2], pass that; here
//! they do not, and the error lists every rank's.

use crate::{Error, Result};
use candle_core::Tensor;
use sconce_collectives::Communicator;

/// Fails on every rank unless all ranks' tensors have one shape, or as many dimensions where `any_size`.
pub(crate) fn check_alike(
    communicator: &dyn Communicator,
    operation: &'static str,
    tensor: &Tensor,
    any_size: bool,
) -> Result<()> {
    let shapes = communicator.all_gather_shapes(tensor)?;
    let is_alike = |shape: &Vec<usize>| {
        if any_size {
            shape.len() == shapes[0].len()
        } else {
            *shape == shapes[0]
        }
    };
    if shapes.iter().all(is_alike) {
        return Ok(());
    }
    let ranks = shapes.iter().enumerate();
    Err(Error::Shapes {
        operation,
        shapes: Vec::from_iter(ranks.map(|(rank, shape)| format!("rank {rank}: {shape:?}"))).join(", "),
    })
}
