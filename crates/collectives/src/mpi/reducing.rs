//! Reductions: every rank gets all ranks' elements of what it is to reduce, and reduces them in the ranks' order.
//!
//! That is what makes sums have the same bits as on every other backend, whatever the MPI library's own algorithm is.

use super::group::{Came, Passage};
use super::library::Requests;
use crate::parts::{LINE, Part, piece_of, rounds_of};
use crate::private::Private;
use crate::reduction::{Ranges, Temperature, reduce};
use crate::{Buffer, ElementType, ReduceOp, Result};

/// Bytes of a piece: what came of it is still in cache when it is reduced.
const PIECE: usize = 256 << 10;

/// How many rounds of pieces are under way at a time.
const DEPTH: usize = 2;

const _: () = assert!(PIECE.is_multiple_of(LINE));

impl Passage<'_> {
    /// Reduces, into `output`, this rank's `own` range and those that came with the calls of the others.
    pub(super) fn reduce_what_came(
        &self,
        came: &Came,
        own: Private,
        output: Private,
        element: ElementType,
        op: ReduceOp,
    ) {
        let of = |rank: usize| came.from(rank, own.len());
        self.reduce_ranges(own, &of, output, element, op);
    }

    /// Reduces, into `output`, all ranks' `parts[rank]` of `input`, where `rank` is this rank; the others do likewise.
    ///
    /// `output` may be that part of `input` itself; parts are either the same or do not overlap.
    pub(super) fn reduce_parts(
        &mut self,
        input: Private,
        parts: &[Part],
        output: Private,
        element: ElementType,
        op: ReduceOp,
    ) -> Result<()> {
        let slot = PIECE.min(output.len().next_multiple_of(LINE));
        let needed = DEPTH * self.group.size * slot;
        let kept = self.engine.scratch.take().filter(|kept| kept.len() >= needed);
        let mut scratch = kept.unwrap_or_else(|| Buffer::on_heap(needed));
        let pieces = Private::of_mut(scratch.as_mut_slice());
        let result = self.reduce_by_rounds(input, parts, output, element, op, (pieces, slot));
        self.engine.scratch = Some(scratch);
        result
    }

    fn reduce_by_rounds(
        &mut self,
        input: Private,
        parts: &[Part],
        output: Private,
        element: ElementType,
        op: ReduceOp,
        (pieces, slot): (Private, usize),
    ) -> Result<()> {
        let (rank, size) = (self.group.rank, self.group.size);
        // What comes from `peer` in a round.
        let piece_from = |peer: usize, round: usize| {
            let start = (round % DEPTH * size + peer) * slot;
            pieces.part(start..start + piece_of(&parts[rank], round, PIECE).len())
        };
        let to = |round| move |peer: usize| input.part(piece_of(&parts[peer], round, PIECE));
        let from = |round| move |peer: usize| piece_from(peer, round);

        let mut data = Requests::default();
        let mut posted = self.post(&mut data, to(0), from(0));
        for round in 0..rounds_of(parts, PIECE) {
            let of_this_round = data.len();
            posted = posted.and_then(|()| self.post(&mut data, to(round + 1), from(round + 1)));
            if posted.is_err() {
                break;
            }
            self.wait_for_data(&mut data, of_this_round)?;
            let piece = piece_of(&parts[rank], round, PIECE);
            if !piece.is_empty() {
                let at = piece.start - parts[rank].start;
                let target = output.part(at..at + piece.len());
                self.reduce_ranges(input.part(piece), &|peer| piece_from(peer, round), target, element, op);
            }
        }
        self.finish(data, posted)
    }

    fn reduce_ranges(
        &self,
        own: Private,
        of: &dyn Fn(usize) -> Private,
        output: Private,
        element: ElementType,
        op: ReduceOp,
    ) {
        let rank = self.group.rank;
        let input = |peer| {
            let range = if peer == rank { own } else { of(peer) };
            range.pointer().cast_const()
        };
        let target = |_| output.pointer();
        let (inputs, outputs) = (Ranges::new(self.group.size, &input), Ranges::new(1, &target));
        let count = output.len() / element.size();
        assert!(
            output.is_writable() && own.len() == output.len(),
            "a writable range of the input's length"
        );
        // SAFETY: all ranges are as long as `output`, hold whole elements and start on one (parts of the callers' buffers by
        // whole elements, slots by cache lines); no message on any of them is under way.
        unsafe { reduce(element, op, inputs, outputs, count, Temperature::Warm) };
    }
}
