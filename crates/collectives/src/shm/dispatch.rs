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
use crate::collective::{Collective, Counts, Each};
use crate::parts::{Part, parts};
use crate::private::Private;
use crate::{Buffer, ElementType, Elements, ReduceOp, Result};

impl Passage<'_> {
    /// Runs a checked collective.
    pub(super) fn dispatch(&mut self, collective: Collective<'_>) -> Result<()> {
        let (rank, size) = (self.group.rank, self.group.size);
        match collective {
            Collective::Barrier => self.enter(0).map(drop),
            Collective::AllReduce { mut buffer, op } => {
                let (element, private) = (buffer.element(), Private::of_mut(buffer.bytes_mut()));
                if private.len() <= SMALL {
                    return self.small_reduce(private, 0, private, element, op);
                }
                match self.enter_in_place(private)? {
                    Some(peers) => self.in_place_all_reduce(&peers, private.len(), element, op),
                    // Two ranks exchange as many bytes this way, with one synchronisation less per piece.
                    None if size == 2 => self.staged_reduce(private, element, op, 0..2),
                    None => self.staged_all_reduce(private, element, op),
                }
            }
            Collective::Reduce { mut buffer, op, root } => {
                let (element, private) = (buffer.element(), Private::of_mut(buffer.bytes_mut()));
                if private.len() <= SMALL {
                    let output = if rank == root { private } else { private.part(0..0) };
                    return self.small_reduce(private, 0, output, element, op);
                }
                self.enter(0)?;
                self.staged_reduce(private, element, op, root..root + 1)
            }
            Collective::ReduceScatter {
                input,
                mut output,
                op,
                counts,
            } => {
                let parts = parts(counts, input.element(), size);
                let (source, target) = (Private::of(input.bytes()), Private::of_mut(output.bytes_mut()));
                self.reduce_scatter(source, target, input.element(), op, &parts)
            }
            Collective::ReduceScatterInPlace { mut buffer, op, counts } => {
                let parts = parts(counts, buffer.element(), size);
                let (element, private) = (buffer.element(), Private::of_mut(buffer.bytes_mut()));
                self.reduce_scatter(private, private.part(parts[rank].clone()), element, op, &parts)
            }
            Collective::AllGather {
                input,
                mut output,
                counts,
            } => {
                let parts = parts(counts, input.element(), size);
                let target = Private::of_mut(output.bytes_mut());
                target
                    .part(parts[rank].clone())
                    .copy_between(&Private::of(input.bytes()));
                self.all_gather(target, &parts)
            }
            Collective::AllGatherInPlace { mut buffer, counts } => {
                let parts = parts(counts, buffer.element(), size);
                self.all_gather(Private::of_mut(buffer.bytes_mut()), &parts)
            }
            Collective::AllGatherEach {
                input, counts, each, ..
            } => self.all_gather_each(input, counts, each),
            Collective::Broadcast { mut buffer, root } => {
                let private = Private::of_mut(buffer.bytes_mut());
                if private.len() <= SMALL {
                    return self.small_broadcast(private, root);
                }
                match self.enter_in_place(private)? {
                    Some(peers) => self.in_place_broadcast(&peers, private, root),
                    None => self.staged_broadcast(private, root),
                }
            }
            Collective::Gather {
                input,
                output,
                counts,
                root,
            } => {
                let parts = parts(counts, input.element(), size);
                let output = output.map(|mut output| Private::of_mut(output.bytes_mut()));
                self.enter(0)?;
                self.staged_gather(Private::of(input.bytes()), output, &parts, root)
            }
            Collective::Scatter {
                input,
                mut output,
                counts,
                root,
            } => {
                let parts = parts(counts, output.element(), size);
                let input = input.map(|input| Private::of(input.bytes()));
                self.enter(0)?;
                self.staged_scatter(input, Private::of_mut(output.bytes_mut()), &parts, root)
            }
            Collective::AllToAll {
                input,
                mut output,
                send,
                receive,
            } => {
                let (send, receive) = (
                    parts(send, input.element(), size),
                    parts(receive, input.element(), size),
                );
                self.enter(0)?;
                let (source, target) = (Private::of(input.bytes()), Private::of_mut(output.bytes_mut()));
                self.staged_all_to_all(source, target, &send, &receive)
            }
            Collective::SendReceive { send, receive } => self.send_receive(send, receive),
        }
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

    /// Fills the other ranks' parts of `buffer`; this rank's is there already.
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

    /// Enters, and returns all ranks' buffers if all lie in shared regions.
    fn enter_in_place(&mut self, buffer: Private) -> Result<Option<Peers>> {
        let location = self.engine.regions.locate(self.group.rank, buffer);
        let sequence = self.enter(location)?;
        self.peers(sequence, buffer.len())
    }
}
