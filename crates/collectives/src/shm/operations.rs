//! Which path an operation takes.
//!
//! | path | when | synchronisations |
//! | --- | --- | --- |
//! | `small` | every rank's contribution fits its small slot | 1 |
//! | `in_place` | all ranks' buffers lie in shared regions | 2 |
//! | `staged` | otherwise: pieces go through the stage slots | 1 or 2 per piece |
//!
//! The choice depends only on what all ranks know: the signature, and the locations that they publish on entering.

use super::group::Passage;
use super::in_place::Peers;
use super::layout::SMALL;
use crate::collective::{Counts, Each};
use crate::operations::Operations;
use crate::parts::{Part, parts};
use crate::private::Private;
use crate::{Buffer, ElementType, Elements, ElementsMut, ReduceOp, Result};

impl Operations for Passage<'_> {
    fn place(&self) -> (usize, usize) {
        (self.group.rank, self.group.size)
    }

    fn barrier(&mut self) -> Result<()> {
        self.enter(0).map(drop)
    }

    fn all_reduce(&mut self, buffer: Private, element: ElementType, op: ReduceOp) -> Result<()> {
        if buffer.len() <= SMALL {
            return self.small_reduce(buffer, 0, buffer, element, op);
        }
        match self.enter_in_place(buffer)? {
            Some(peers) => self.in_place_all_reduce(&peers, buffer.len(), element, op),
            // Two ranks exchange as many bytes this way, with one synchronisation less per piece.
            None if self.group.size == 2 => self.staged_reduce(buffer, element, op, 0..2),
            None => self.staged_all_reduce(buffer, element, op),
        }
    }

    fn reduce(&mut self, buffer: Private, element: ElementType, op: ReduceOp, root: usize) -> Result<()> {
        if buffer.len() <= SMALL {
            let is_root = self.group.rank == root;
            let output = if is_root { buffer } else { buffer.part(0..0) };
            return self.small_reduce(buffer, 0, output, element, op);
        }
        self.enter(0)?;
        self.staged_reduce(buffer, element, op, root..root + 1)
    }

    fn reduce_scatter(
        &mut self,
        input: Private,
        output: Private,
        element: ElementType,
        op: ReduceOp,
        parts: &[Part],
    ) -> Result<()> {
        let own = &parts[self.group.rank];
        if input.len() <= SMALL {
            return self.small_reduce(input, own.start, output, element, op);
        }
        match self.enter_in_place(input)? {
            Some(peers) => self.in_place_reduce_scatter(&peers, output, element, op, own),
            None => self.staged_reduce_scatter(input, output, element, op, parts),
        }
    }

    fn all_gather(&mut self, buffer: Private, parts: &[Part]) -> Result<()> {
        if parts.iter().all(|part| part.len() <= SMALL) {
            return self.small_all_gather(buffer, parts);
        }
        match self.enter_in_place(buffer)? {
            Some(peers) => self.in_place_all_gather(&peers, &parts[self.group.rank]),
            None => self.staged_all_gather(buffer, parts),
        }
    }

    /// Hands every rank's input on, straight from where it lies if all lie in shared regions.
    fn all_gather_each(&mut self, input: Elements<'_>, counts: Counts<'_>, each: Each<'_>) -> Result<()> {
        match self.enter_in_place(Private::of(input.bytes()))? {
            Some(peers) => self.in_place_all_gather_each(&peers, input, each),
            None => {
                let (element, parts) = (input.element(), parts(counts, input.element(), self.group.size));
                let mut whole = Buffer::on_heap(parts.last().map_or(0, |part| part.end));
                let bytes = whole.as_mut_slice::<u8>();
                bytes[parts[self.group.rank].clone()].copy_from_slice(input.bytes());
                self.staged_all_gather(Private::of_mut(bytes), &parts)?;
                let numbered = parts.into_iter().enumerate();
                numbered.for_each(|(rank, part)| each.0(rank, Elements::of_bytes(element, &bytes[part])));
                Ok(())
            }
        }
    }

    fn broadcast(&mut self, buffer: Private, root: usize) -> Result<()> {
        if buffer.len() <= SMALL {
            return self.small_broadcast(buffer, root);
        }
        match self.enter_in_place(buffer)? {
            Some(peers) => self.in_place_broadcast(&peers, buffer, root),
            None => self.staged_broadcast(buffer, root),
        }
    }

    fn gather(&mut self, input: Private, output: Option<Private>, parts: &[Part], root: usize) -> Result<()> {
        self.enter(0)?;
        self.staged_gather(input, output, parts, root)
    }

    fn scatter(&mut self, input: Option<Private>, output: Private, parts: &[Part], root: usize) -> Result<()> {
        self.enter(0)?;
        self.staged_scatter(input, output, parts, root)
    }

    fn all_to_all(
        &mut self,
        source: Private,
        target: Private,
        send: &[Part],
        receive: &[Part],
        _are_equal: bool,
    ) -> Result<()> {
        self.enter(0)?;
        self.staged_all_to_all(source, target, send, receive)
    }

    fn send_receive(
        &mut self,
        send: Option<(Elements<'_>, usize)>,
        receive: Option<(ElementsMut<'_>, usize)>,
    ) -> Result<()> {
        self.exchange_messages(send, receive)
    }
}

impl Passage<'_> {
    /// Enters, and returns all ranks' buffers if all lie in shared regions.
    fn enter_in_place(&mut self, buffer: Private) -> Result<Option<Peers>> {
        let location = self.engine.regions.locate(self.group.rank, buffer);
        let sequence = self.enter(location)?;
        self.peers(sequence, buffer.len())
    }
}
