//! Collectives taken apart for backends that work on the caller's memory.

use crate::collective::{Collective, Counts, Each};
use crate::parts::{Part, parts};
use crate::private::Private;
use crate::{ElementType, Elements, ElementsMut, ReduceOp, Result};

/// One operation under way on one rank, as a backend carries it out; what it is given has been checked.
pub(crate) trait Operations {
    /// Returns this rank, and the number of ranks.
    fn place(&self) -> (usize, usize);

    fn barrier(&mut self) -> Result<()>;

    fn all_reduce(&mut self, buffer: Private, element: ElementType, op: ReduceOp) -> Result<()>;

    fn reduce(&mut self, buffer: Private, element: ElementType, op: ReduceOp, root: usize) -> Result<()>;

    fn reduce_scatter(
        &mut self,
        input: Private,
        output: Private,
        element: ElementType,
        op: ReduceOp,
        parts: &[Part],
    ) -> Result<()>;

    /// Fills the other ranks' parts of `buffer`; this rank's is there already.
    fn all_gather(&mut self, buffer: Private, parts: &[Part]) -> Result<()>;

    fn all_gather_each(&mut self, input: Elements<'_>, counts: Counts<'_>, each: Each<'_>) -> Result<()>;

    fn broadcast(&mut self, buffer: Private, root: usize) -> Result<()>;

    /// `output` is there on the root.
    fn gather(&mut self, input: Private, output: Option<Private>, parts: &[Part], root: usize) -> Result<()>;

    /// `input` is there on the root.
    fn scatter(&mut self, input: Option<Private>, output: Private, parts: &[Part], root: usize) -> Result<()>;

    /// `are_equal` says that all parts have one length on all ranks.
    fn all_to_all(
        &mut self,
        source: Private,
        target: Private,
        send: &[Part],
        receive: &[Part],
        are_equal: bool,
    ) -> Result<()>;

    fn send_receive(
        &mut self,
        send: Option<(Elements<'_>, usize)>,
        receive: Option<(ElementsMut<'_>, usize)>,
    ) -> Result<()>;
}

/// Runs a checked collective.
pub(crate) fn dispatch(operations: &mut impl Operations, collective: Collective<'_>) -> Result<()> {
    let (rank, size) = operations.place();
    match collective {
        Collective::Barrier => operations.barrier(),
        Collective::AllReduce { mut buffer, op } => {
            let (element, private) = (buffer.element(), Private::of_mut(buffer.bytes_mut()));
            operations.all_reduce(private, element, op)
        }
        Collective::Reduce { mut buffer, op, root } => {
            let (element, private) = (buffer.element(), Private::of_mut(buffer.bytes_mut()));
            operations.reduce(private, element, op, root)
        }
        Collective::ReduceScatter {
            input,
            mut output,
            op,
            counts,
        } => {
            let parts = parts(counts, input.element(), size);
            let (source, target) = (Private::of(input.bytes()), Private::of_mut(output.bytes_mut()));
            operations.reduce_scatter(source, target, input.element(), op, &parts)
        }
        Collective::ReduceScatterInPlace { mut buffer, op, counts } => {
            let parts = parts(counts, buffer.element(), size);
            let (element, private) = (buffer.element(), Private::of_mut(buffer.bytes_mut()));
            operations.reduce_scatter(private, private.part(parts[rank].clone()), element, op, &parts)
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
            operations.all_gather(target, &parts)
        }
        Collective::AllGatherInPlace { mut buffer, counts, .. } => {
            let parts = parts(counts, buffer.element(), size);
            operations.all_gather(Private::of_mut(buffer.bytes_mut()), &parts)
        }
        Collective::AllGatherEach {
            input, counts, each, ..
        } => operations.all_gather_each(input, counts, each),
        Collective::Broadcast { mut buffer, root } => operations.broadcast(Private::of_mut(buffer.bytes_mut()), root),
        Collective::Gather {
            input,
            output,
            counts,
            root,
        } => {
            let parts = parts(counts, input.element(), size);
            let output = output.map(|mut output| Private::of_mut(output.bytes_mut()));
            operations.gather(Private::of(input.bytes()), output, &parts, root)
        }
        Collective::Scatter {
            input,
            mut output,
            counts,
            root,
        } => {
            let parts = parts(counts, output.element(), size);
            let input = input.map(|input| Private::of(input.bytes()));
            operations.scatter(input, Private::of_mut(output.bytes_mut()), &parts, root)
        }
        Collective::AllToAll {
            input,
            mut output,
            send,
            receive,
        } => {
            let are_equal = matches!(send, Counts::Equal(_));
            let of = |counts| parts(counts, input.element(), size);
            let (send, receive) = (of(send), of(receive));
            let (source, target) = (Private::of(input.bytes()), Private::of_mut(output.bytes_mut()));
            operations.all_to_all(source, target, &send, &receive, are_equal)
        }
        Collective::SendReceive { send, receive } => operations.send_receive(send, receive),
    }
}
