//! Which messages an operation is made of.
//!
//! Where every rank's contribution to every other fits [`Group::small`](super::group::Group::small), it goes with the call.
//! Otherwise it follows in messages of its own, straight between the callers' buffers. Every rank exchanges with every other
//! at the same time.

use super::group::Passage;
use super::library::Requests;
use crate::collective::{Counts, Each};
use crate::operations::Operations;
use crate::parts::{Part, lines_of, parts};
use crate::private::Private;
use crate::{Buffer, ElementType, Elements, ElementsMut, ReduceOp, Result};

/// Tag of data.
const DATA: i32 = 2;

/// From this many ranks on, and this many bytes, a broadcast deals the buffer out first.
const DEAL_OUT: (usize, usize) = (3, 1 << 16);

impl Operations for Passage<'_> {
    fn place(&self) -> (usize, usize) {
        (self.group.rank, self.group.size)
    }

    fn barrier(&mut self) -> Result<()> {
        self.enter(|_| nothing()).map(drop)
    }

    fn all_reduce(&mut self, buffer: Private, element: ElementType, op: ReduceOp) -> Result<()> {
        let (rank, size) = (self.group.rank, self.group.size);
        if buffer.len() <= self.group.small {
            let came = self.enter(|_| buffer)?;
            self.reduce_what_came(&came, buffer, buffer, element, op);
            return Ok(());
        }
        self.enter(|_| nothing())?;
        let parts = even_parts(buffer.len(), size);
        let own = buffer.part(parts[rank].clone());
        self.reduce_parts(buffer, &parts, own, element, op)?;
        self.transfer(|_| own, |peer| buffer.part(parts[peer].clone()))
    }

    fn reduce(&mut self, buffer: Private, element: ElementType, op: ReduceOp, root: usize) -> Result<()> {
        let (rank, size) = (self.group.rank, self.group.size);
        if buffer.len() <= self.group.small {
            let came = self.enter(|peer| if peer == root { buffer } else { nothing() })?;
            if rank == root {
                self.reduce_what_came(&came, buffer, buffer, element, op);
            }
            return Ok(());
        }
        self.enter(|_| nothing())?;
        if size == 2 {
            let mut parts = [0..0, 0..0];
            parts[root] = buffer.whole();
            return self.reduce_parts(buffer, &parts, buffer.part(parts[rank].clone()), element, op);
        }
        let parts = even_parts(buffer.len(), size);
        let part = |peer: usize| buffer.part(parts[peer].clone());
        if rank == root {
            self.reduce_parts(buffer, &parts, part(rank), element, op)?;
            return self.transfer(|_| nothing(), part);
        }
        let mut own = Buffer::on_heap(parts[rank].len());
        let own = Private::of_mut(own.as_mut_slice());
        self.reduce_parts(buffer, &parts, own, element, op)?;
        self.transfer(|peer| if peer == root { own } else { nothing() }, |_| nothing())
    }

    fn reduce_scatter(
        &mut self,
        input: Private,
        output: Private,
        element: ElementType,
        op: ReduceOp,
        parts: &[Part],
    ) -> Result<()> {
        if longest(parts) > self.group.small {
            self.enter(|_| nothing())?;
            return self.reduce_parts(input, parts, output, element, op);
        }
        let came = self.enter(|peer| input.part(parts[peer].clone()))?;
        let own = input.part(parts[self.group.rank].clone());
        self.reduce_what_came(&came, own, output, element, op);
        Ok(())
    }

    fn all_gather(&mut self, buffer: Private, parts: &[Part]) -> Result<()> {
        let own = buffer.part(parts[self.group.rank].clone());
        self.exchange(longest(parts), |_| own, |peer| buffer.part(parts[peer].clone()))
    }

    fn all_gather_each(&mut self, input: Elements<'_>, counts: Counts<'_>, each: Each<'_>) -> Result<()> {
        let (rank, element) = (self.group.rank, input.element());
        let parts = parts(counts, element, self.group.size);
        let mut whole = Buffer::on_heap(parts.last().map_or(0, |part| part.end));
        let bytes = whole.as_mut_slice::<u8>();
        let (own, target) = (Private::of(input.bytes()), Private::of_mut(bytes));
        let from = |peer: usize| target.part(parts[peer].clone());
        self.exchange(longest(&parts), |_| own, from)?;
        each.0(rank, input);
        for peer in self.others() {
            each.0(peer, Elements::of_bytes(element, &bytes[parts[peer].clone()]));
        }
        Ok(())
    }

    fn broadcast(&mut self, buffer: Private, root: usize) -> Result<()> {
        let (rank, size) = (self.group.rank, self.group.size);
        let of_root = |private: Private| if rank == root { private } else { nothing() };
        let from_root = |private: Private, peer: usize| if peer == root { private } else { nothing() };
        if size < DEAL_OUT.0 || buffer.len() < DEAL_OUT.1 {
            return self.exchange(buffer.len(), |_| of_root(buffer), |peer| from_root(buffer, peer));
        }
        // Each rank passes on what it is dealt, so that the root sends everything once, not once to everyone.
        let parts = even_parts(buffer.len(), size);
        let part = |peer: usize| buffer.part(parts[peer].clone());
        self.enter(|_| nothing())?;
        self.transfer(|peer| of_root(part(peer)), |peer| from_root(part(rank), peer))?;
        let to = |peer| if peer == root { nothing() } else { part(rank) };
        let from = |peer| if rank == root { nothing() } else { part(peer) };
        self.transfer(to, from)
    }

    fn gather(&mut self, input: Private, output: Option<Private>, parts: &[Part], root: usize) -> Result<()> {
        if let Some(output) = &output {
            output.part(parts[self.group.rank].clone()).copy_between(&input);
        }
        let to = |peer| if peer == root { input } else { nothing() };
        let from = |peer: usize| output.map_or_else(nothing, |output| output.part(parts[peer].clone()));
        self.exchange(longest(parts), to, from)
    }

    fn scatter(&mut self, input: Option<Private>, output: Private, parts: &[Part], root: usize) -> Result<()> {
        if let Some(input) = &input {
            output.copy_between(&input.part(parts[self.group.rank].clone()));
        }
        let to = |peer: usize| input.map_or_else(nothing, |input| input.part(parts[peer].clone()));
        let from = |peer| if peer == root { output } else { nothing() };
        self.exchange(longest(parts), to, from)
    }

    fn all_to_all(
        &mut self,
        source: Private,
        target: Private,
        send: &[Part],
        receive: &[Part],
        are_equal: bool,
    ) -> Result<()> {
        let rank = self.group.rank;
        target
            .part(receive[rank].clone())
            .copy_between(&source.part(send[rank].clone()));
        let to = |peer: usize| source.part(send[peer].clone());
        let from = |peer: usize| target.part(receive[peer].clone());
        if are_equal {
            return self.exchange(longest(send), to, from);
        }
        self.enter(|_| nothing())?;
        self.compare_lengths(send, receive)?;
        self.transfer(to, from)
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
    /// Sends `to(rank)` to every other rank and receives `from(rank)` from it; `largest` is no less than any of all ranks'.
    pub(super) fn exchange(
        &mut self,
        largest: usize,
        to: impl Fn(usize) -> Private,
        from: impl Fn(usize) -> Private,
    ) -> Result<()> {
        if largest > self.group.small {
            self.enter(|_| nothing())?;
            return self.transfer(to, from);
        }
        let came = self.enter(to)?;
        for peer in self.others() {
            let target = from(peer);
            if target.len() > 0 {
                target.copy_between(&came.from(peer, target.len()));
            }
        }
        Ok(())
    }

    /// Moves data that all ranks have agreed on.
    pub(super) fn transfer(&mut self, to: impl Fn(usize) -> Private, from: impl Fn(usize) -> Private) -> Result<()> {
        let mut data = Requests::default();
        let posted = self.post(&mut data, to, from);
        self.finish(data, posted)
    }

    /// Starts to send `to(rank)` to every other rank and to receive `from(rank)` from it.
    pub(super) fn post(
        &self,
        data: &mut Requests,
        to: impl Fn(usize) -> Private,
        from: impl Fn(usize) -> Private,
    ) -> Result<()> {
        let (library, channel) = (self.group.library, self.group.channel);
        self.others()
            .try_for_each(|peer| data.receive(library, channel, from(peer), peer, DATA))?;
        self.others()
            .try_for_each(|peer| data.send(library, channel, to(peer), peer, DATA))
    }

    /// Waits for all of `data`, of which `posted` says whether it could be posted.
    pub(super) fn finish(&mut self, mut data: Requests, posted: Result<()>) -> Result<()> {
        if let Err(error) = posted {
            self.settle(&mut data, &error);
            return Err(error);
        }
        let all = data.len();
        self.wait_for_data(&mut data, all)
    }

    /// Returns the other ranks, beginning with the next, so that not all begin with the same.
    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.group.rank, self.group.size);
        (1..size).map(move |distance| (rank + distance) % size)
    }

    /// Finds ranks that send other lengths than are expected of them, the same on all ranks.
    fn compare_lengths(&mut self, send: &[Part], receive: &[Part]) -> Result<()> {
        let (rank, size) = (self.group.rank, self.group.size);
        // One row per rank: what it sends to each, then what it expects of each.
        let row = 2 * size;
        let mut lengths = vec![0u64; size * row];
        let own = send.iter().chain(receive).map(|part| part.len() as u64);
        lengths[rank * row..][..row]
            .iter_mut()
            .zip(own)
            .for_each(|(slot, length)| *slot = length);
        let rows = Private::of_mut(bytemuck::cast_slice_mut(&mut lengths));
        let row_of = |peer: usize| rows.part(peer * row * 8..(peer + 1) * row * 8);
        self.transfer(|_| row_of(rank), row_of)?;
        for (to, from) in (0..size).flat_map(|to| (0..size).map(move |from| (to, from))) {
            let (sends, expects) = (lengths[from * row + to], lengths[to * row + size + from]);
            if sends != expects {
                let calls = [
                    (from, format!("sends {sends} bytes to {to}")),
                    (to, format!("expects {expects} from {from}")),
                ];
                return Err(self.mismatch(self.sequence() - 1, calls.into_iter()));
            }
        }
        Ok(())
    }
}

/// No memory at all.
pub(super) fn nothing() -> Private {
    Private::of_mut(&mut [])
}

fn longest(parts: &[Part]) -> usize {
    parts.iter().map(Part::len).max().unwrap_or(0)
}

fn even_parts(bytes: usize, size: usize) -> Vec<Part> {
    (0..size).map(|rank| lines_of(bytes, rank, size)).collect()
}
