//! Small operations: every rank writes its whole contribution into its small slot, enters, and reads its peers' slots.
//!
//! One synchronisation is enough. A slot belongs to an operation number's parity: it is written again two operations
//! later, and by then every rank has entered the operation between, so it has finished reading.

use super::group::Passage;
use crate::parts::Part;
use crate::private::Private;
use crate::reduction::{Ranges, Temperature, reduce};
use crate::{ElementType, ReduceOp, Result};

impl Passage<'_> {
    /// Reduces the bytes from `start` on of all ranks' `input` into `output`, which may be (part of) the input.
    pub(super) fn small_reduce(
        &mut self,
        input: Private,
        start: usize,
        output: Private,
        element: ElementType,
        op: ReduceOp,
    ) -> Result<()> {
        let sequence = self.contribute(input)?;
        let segment = &self.group.segment;
        let own = input.part(start..start + output.len()).pointer().cast_const();
        let slot = |rank| segment.bytes(segment.layout().small(rank, sequence), start, output.len());
        // The own contribution is still where the caller has it, and nearer.
        let source = |rank| {
            if rank == self.group.rank {
                own
            } else {
                slot(rank).cast_const()
            }
        };
        let target = |_| output.pointer();
        let (inputs, outputs) = (Ranges::new(self.group.size, &source), Ranges::new(1, &target));
        // SAFETY: all ranks have entered, so the slots are written and stay untouched until this rank's next but one
        // operation (module page); `output` is the caller's, aligned and a whole number of elements.
        unsafe {
            reduce(
                element,
                op,
                inputs,
                outputs,
                output.len() / element.size(),
                Temperature::Warm,
            );
        };
        Ok(())
    }

    /// Fills the other ranks' parts of `buffer`; this rank's is there already.
    pub(super) fn small_all_gather(&mut self, buffer: Private, parts: &[Part]) -> Result<()> {
        let sequence = self.contribute(buffer.part(parts[self.group.rank].clone()))?;
        for (rank, part) in parts.iter().enumerate().filter(|(rank, _)| *rank != self.group.rank) {
            let slot = self.group.segment.layout().small(rank, sequence);
            buffer.part(part.clone()).copy_from(&self.group.segment, slot, 0);
        }
        Ok(())
    }

    pub(super) fn small_broadcast(&mut self, buffer: Private, root: usize) -> Result<()> {
        let is_root = self.group.rank == root;
        let sequence = self.contribute(if is_root { buffer } else { buffer.part(0..0) })?;
        if !is_root {
            let slot = self.group.segment.layout().small(root, sequence);
            buffer.copy_from(&self.group.segment, slot, 0);
        }
        Ok(())
    }

    /// Writes this rank's contribution and enters; returns the operation's number.
    fn contribute(&mut self, input: Private) -> Result<u64> {
        let slot = self.group.segment.layout().small(self.group.rank, self.engine.sequence);
        input.copy_to(&self.group.segment, slot, 0);
        self.enter(0)
    }
}
