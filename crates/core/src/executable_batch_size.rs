//! The largest batch size that fits in memory, found by trying.

use crate::{Accelerator, Error, Result};
use sconce_collectives::ReduceOp;

impl<'a> dyn Accelerator + 'a {
    /// Calls `attempt` with smaller and smaller batch sizes, each nine tenths of the one before, until it does not run out of
    /// memory on any rank; returns that size and what it returned. Called by all ranks.
    ///
    /// Ranks tell each other how an attempt went when it has ended, so `attempt` must not wait for other ranks itself: it
    /// tries a forward and a backward of a model of its own, before training begins. What counts as out of memory are
    /// errors that say so ([`is_out_of_memory`]): a GPU's, and a host's where the system refuses; a system that promises
    /// more memory than it has ends the process instead.
    ///
    /// # Errors
    /// [`Error::NoBatchSize`] when not even one sample fits; other failures of `attempt` on any rank, on all ranks
    /// ([`Accelerator::together`](trait.Accelerator.html)); failures of the group.
    pub fn find_executable_batch_size<R, E: std::error::Error + 'static>(
        &self,
        start: usize,
        mut attempt: impl FnMut(usize) -> std::result::Result<R, E>,
    ) -> Result<(usize, R)> {
        let mut size = start;
        while size > 0 {
            let outcome = attempt(size);
            let is_too_large = outcome.as_ref().is_err_and(|error| is_out_of_memory(error));
            let mut somewhere = [u8::from(is_too_large)];
            self.communicator().all_reduce(&mut somewhere, ReduceOp::Max)?;
            if somewhere == [0] {
                return Ok((size, self.together(outcome)?));
            }
            // In whole numbers, as int(0.9 * size).
            size = size * 9 / 10;
        }
        Err(Error::NoBatchSize { start })
    }
}

/// Says whether an error, or one behind it, is that memory ran out, on a device or on the host.
pub fn is_out_of_memory(error: &(dyn std::error::Error + 'static)) -> bool {
    let chain = std::iter::successors(Some(error), |error| error.source());
    chain.into_iter().any(|error| {
        let is_of_system = error
            .downcast_ref::<std::io::Error>()
            .is_some_and(|error| error.kind() == std::io::ErrorKind::OutOfMemory);
        let is_of_allocator = error.is::<std::collections::TryReserveError>();
        let text = error.to_string().to_ascii_lowercase();
        let words = [
            "out of memory",
            "out_of_memory",
            "cannot allocate memory",
            "memory allocation failed",
            "alloc_failed",
        ];
        is_of_system || is_of_allocator || words.iter().any(|words| text.contains(words))
    })
}
