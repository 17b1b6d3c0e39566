//! What carries plans out over NCCL: a communicator, and device memory.

use super::library::{Handle, ID};
use super::memory::Memory;
use super::owner::{Carrier, Watch};
use super::plan::Plan;
use crate::Result;
use crate::private::Private;

/// A communicator with the memory that its data is staged through.
#[derive(Debug)]
pub(super) struct NcclCarrier {
    // Ends before its memory is freed.
    handle: Handle,
    memory: Memory,
}

impl NcclCarrier {
    /// Meets the other ranks that have this id, on one GPU.
    pub(super) fn connect(id: [u8; ID], (rank, size): (usize, usize), gpu: usize, watch: Watch<'_>) -> Result<Self> {
        let memory = Memory::on_device(gpu)?;
        let handle = Handle::connect(id, rank, size, watch)?;
        Ok(Self { handle, memory })
    }

    fn try_carry(&mut self, plan: &Plan, input: &[u8], output: &mut [u8], watch: Watch<'_>) -> Result<()> {
        self.memory.fill(input, output.len())?;
        self.handle
            .enqueue(plan, &mut self.memory, (input.len(), output.len()), watch)?;
        self.handle.wait(&self.memory.mark()?, watch)?;
        self.memory.read(output)
    }
}

/// An operation on memory of the caller's: unless it comes to its end, the communicator is aborted, or the process ended,
/// before the caller has its memory back.
struct Attempt<'h>(&'h mut Handle);

impl Attempt<'_> {
    fn succeed(self) {
        std::mem::forget(self);
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Carrier for NcclCarrier {
    fn carry(&mut self, plan: &Plan, input: &[u8], output: &mut [u8], watch: Watch<'_>) -> Result<()> {
        self.try_carry(plan, input, output, watch)
            .inspect_err(|_| self.handle.abort())
    }

    fn carry_in_place(&mut self, plan: &Plan, input: Private, output: Private, watch: Watch<'_>) -> Result<()> {
        let attempt = Attempt(&mut self.handle);
        attempt.0.enqueue_in_place(plan, &self.memory, (input, output), watch)?;
        attempt.0.wait(&self.memory.mark()?, watch)?;
        attempt.succeed();
        Ok(())
    }

    fn split(
        &mut self,
        color: Option<u32>,
        place: (usize, usize),
        watch: Watch<'_>,
    ) -> Result<Option<Box<dyn Carrier>>> {
        let split = self.handle.split(color, place, watch);
        let Some(handle) = split.inspect_err(|_| self.handle.abort())? else {
            return Ok(None);
        };
        let memory = Memory::on_device(self.memory.device())?;
        Ok(Some(Box::new(Self { handle, memory })))
    }
}
