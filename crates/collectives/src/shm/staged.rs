//! Operations on private memory: pieces go through stage slots that stay in cache.
//!
//! All but the all-reduce of three ranks or more follow one scheme, [`Passage::exchange`]: in each round a rank *produces*
//! (writes what its peers need into its stage slot), publishes, waits for its peers and *consumes* (reads their slots). A
//! rank produces one round ahead of consuming, so that a slow peer does not stall it at once.
//!
//! Why [`STAGE_SLOTS`] = 4 slots are enough: before producing round k + 1 a rank has seen every peer publish round
//! k - 1, which a peer does after consuming round k - 3; the slot written is that of round k - 3. In the all-reduce the
//! rank has also seen the results of round k - 1, so even three would do.

use super::group::Passage;
use super::layout::STAGE;
use crate::copy::LARGE;
use crate::parts::{LINE, Part, lines_of, piece_of, rounds_of};
use crate::private::Private;
use crate::reduction::{Ranges, Temperature, reduce};
use crate::{ElementType, ReduceOp, Result};
use std::ops::Range;

impl Passage<'_> {
    pub(super) fn staged_all_reduce(&mut self, buffer: Private, element: ElementType, op: ReduceOp) -> Result<()> {
        let (group, rank, size) = (self.group, self.group.rank, self.group.size);
        let segment = &group.segment;
        let slot = |peer, round| segment.layout().stage(peer, round);
        let others = || (0..size).filter(|peer| *peer != rank);
        let piece = |round| piece_of(&buffer.whole(), round, STAGE);
        let chunk = |round, peer| lines_of(piece(round).len(), peer, size);
        let produce = |round: usize| {
            for peer in others() {
                let chunk = chunk(round, peer);
                buffer
                    .part(piece(round))
                    .part(chunk.clone())
                    .copy_to(segment, slot(rank, round), chunk.start);
            }
        };
        let base = self.engine.epoch;
        produce(0);
        self.publish();
        for round in 0..buffer.whole().len().div_ceil(STAGE) {
            produce(round + 1);
            self.publish();
            // Steps of this operation: inputs of round 0, then by turns inputs of round k + 1 and results of round k.
            let inputs_ready = if round == 0 { 1 } else { 2 * round as u32 };
            self.wait_for_all(base.wrapping_add(inputs_ready))?;
            let own = chunk(round, rank);
            let private = buffer.part(piece(round)).part(own.clone()).pointer();
            let staged = |peer| segment.bytes(slot(peer, round), own.start, own.len());
            let input = |peer| {
                if peer == rank {
                    private.cast_const()
                } else {
                    staged(peer).cast_const()
                }
            };
            let output = |number| if number == 0 { private } else { staged(rank) };
            let (inputs, outputs) = (Ranges::new(size, &input), Ranges::new(2, &output));
            // SAFETY: every peer has announced this round's inputs; chunk `rank` of all slots is this rank's alone now,
            // and the private range is the caller's, lent for the whole operation.
            unsafe {
                reduce(
                    element,
                    op,
                    inputs,
                    outputs,
                    own.len() / element.size(),
                    Temperature::Warm,
                );
            };
            self.publish();
            self.wait_for_all(base.wrapping_add(2 * round as u32 + 3))?;
            for peer in others() {
                let chunk = chunk(round, peer);
                buffer
                    .part(piece(round))
                    .part(chunk.clone())
                    .copy_from(segment, slot(peer, round), chunk.start);
            }
        }
        Ok(())
    }

    /// Reduces all buffers into those of the roots: each root sums everything by itself.
    pub(super) fn staged_reduce(
        &mut self,
        buffer: Private,
        element: ElementType,
        op: ReduceOp,
        roots: Range<usize>,
    ) -> Result<()> {
        let (group, rank) = (self.group, self.group.rank);
        let segment = &group.segment;
        let slot = |peer, round| segment.layout().stage(peer, round);
        let piece = |round| piece_of(&buffer.whole(), round, STAGE);
        let produce = |round| {
            if roots != (rank..rank + 1) {
                buffer.part(piece(round)).copy_to(segment, slot(rank, round), 0);
            }
        };
        let consume = |round| {
            if roots.contains(&rank) {
                let own = buffer.part(piece(round));
                let staged = |peer| segment.bytes(slot(peer, round), 0, own.len()).cast_const();
                let input = |peer| {
                    if peer == rank {
                        own.pointer().cast_const()
                    } else {
                        staged(peer)
                    }
                };
                let output = |_| own.pointer();
                let (inputs, outputs) = (Ranges::new(group.size, &input), Ranges::new(1, &output));
                // SAFETY: the slots of this round are announced and not yet reused (module page); `own` is the caller's.
                unsafe {
                    reduce(
                        element,
                        op,
                        inputs,
                        outputs,
                        own.len() / element.size(),
                        Temperature::Warm,
                    );
                };
            }
        };
        self.exchange(buffer.len().div_ceil(STAGE), produce, consume)
    }

    /// Reduces part r of all `input`s into rank r's `output`, which may be that part of its input.
    pub(super) fn staged_reduce_scatter(
        &mut self,
        input: Private,
        output: Private,
        element: ElementType,
        op: ReduceOp,
        parts: &[Part],
    ) -> Result<()> {
        let (group, rank) = (self.group, self.group.rank);
        let segment = &group.segment;
        let slot = |peer, round| segment.layout().stage(peer, round);
        let share = share_of_slot(group.size);
        let temperature = temperature_of(input.part(parts[rank].clone()).pointer(), &output);
        let produce = |round| {
            for (peer, part) in parts.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                input
                    .part(piece_of(part, round, share))
                    .copy_to(segment, slot(rank, round), peer * share);
            }
        };
        let consume = |round| {
            let own = input.part(piece_of(&parts[rank], round, share));
            let target = output.part(piece_of(&output.whole(), round, share)).pointer();
            let staged = |peer| segment.bytes(slot(peer, round), rank * share, own.len()).cast_const();
            let source = |peer| {
                if peer == rank {
                    own.pointer().cast_const()
                } else {
                    staged(peer)
                }
            };
            let output = |_| target;
            let (inputs, outputs) = (Ranges::new(group.size, &source), Ranges::new(1, &output));
            // SAFETY: the slots of this round are announced and not yet reused (module page); both private ranges are
            // the caller's, and the output is disjoint from or equal to this rank's part of the input.
            unsafe {
                reduce(element, op, inputs, outputs, own.len() / element.size(), temperature);
            };
        };
        self.exchange(rounds_of(parts, share), produce, consume)
    }

    /// Fills the other ranks' parts of `buffer`; this rank's is there already.
    pub(super) fn staged_all_gather(&mut self, buffer: Private, parts: &[Part]) -> Result<()> {
        let (group, rank) = (self.group, self.group.rank);
        let segment = &group.segment;
        let slot = |peer, round| segment.layout().stage(peer, round);
        let produce = |round| {
            buffer
                .part(piece_of(&parts[rank], round, STAGE))
                .copy_to(segment, slot(rank, round), 0);
        };
        let consume = |round| {
            for (peer, part) in parts.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                buffer
                    .part(piece_of(part, round, STAGE))
                    .copy_from(segment, slot(peer, round), 0);
            }
        };
        self.exchange(rounds_of(parts, STAGE), produce, consume)
    }

    pub(super) fn staged_broadcast(&mut self, buffer: Private, root: usize) -> Result<()> {
        let (group, rank) = (self.group, self.group.rank);
        let segment = &group.segment;
        let piece = |round| buffer.part(piece_of(&buffer.whole(), round, STAGE));
        let slot = |round| segment.layout().stage(root, round);
        let produce = |round| {
            if rank == root {
                piece(round).copy_to(segment, slot(round), 0);
            }
        };
        let consume = |round| {
            if rank != root {
                piece(round).copy_from(segment, slot(round), 0);
            }
        };
        self.exchange(buffer.len().div_ceil(STAGE), produce, consume)
    }

    /// Collects every rank's `input` in the root's `output`.
    pub(super) fn staged_gather(
        &mut self,
        input: Private,
        output: Option<Private>,
        parts: &[Part],
        root: usize,
    ) -> Result<()> {
        let (group, rank) = (self.group, self.group.rank);
        let segment = &group.segment;
        let slot = |peer, round| segment.layout().stage(peer, round);
        if let Some(output) = &output {
            output.part(parts[rank].clone()).copy_between(&input);
        }
        let produce = |round| {
            if rank != root {
                input
                    .part(piece_of(&input.whole(), round, STAGE))
                    .copy_to(segment, slot(rank, round), 0);
            }
        };
        let consume = |round| {
            let Some(output) = &output else { return };
            for (peer, part) in parts.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                output
                    .part(piece_of(part, round, STAGE))
                    .copy_from(segment, slot(peer, round), 0);
            }
        };
        self.exchange(rounds_of(parts, STAGE), produce, consume)
    }

    /// Deals the root's `input` out into every rank's `output`.
    pub(super) fn staged_scatter(
        &mut self,
        input: Option<Private>,
        output: Private,
        parts: &[Part],
        root: usize,
    ) -> Result<()> {
        let (group, rank) = (self.group, self.group.rank);
        let segment = &group.segment;
        let share = share_of_slot(group.size);
        let slot = |round| segment.layout().stage(root, round);
        if let Some(input) = &input {
            output.copy_between(&input.part(parts[rank].clone()));
        }
        let produce = |round| {
            let Some(input) = &input else { return };
            for (peer, part) in parts.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                input
                    .part(piece_of(part, round, share))
                    .copy_to(segment, slot(round), peer * share);
            }
        };
        let consume = |round| {
            if rank != root {
                output
                    .part(piece_of(&output.whole(), round, share))
                    .copy_from(segment, slot(round), rank * share);
            }
        };
        self.exchange(rounds_of(parts, share), produce, consume)
    }

    /// Exchanges parts; `send` and `receive` are in bytes, by peer.
    pub(super) fn staged_all_to_all(
        &mut self,
        input: Private,
        output: Private,
        send: &[Part],
        receive: &[Part],
    ) -> Result<()> {
        let (group, rank) = (self.group, self.group.rank);
        let segment = &group.segment;
        let slot = |peer, round| segment.layout().stage(peer, round);
        let share = share_of_slot(group.size);
        // Every rank must make as many rounds as the largest message needs, and sizes on both sides must agree.
        let mut sizes = vec![0u8; 8 * group.size * group.size];
        let row = 8 * group.size;
        for (peer, part) in send.iter().enumerate() {
            sizes[rank * row + 8 * peer..][..8].copy_from_slice(&(part.len() as u64).to_le_bytes());
        }
        let rows: Vec<Part> = (0..group.size).map(|peer| peer * row..(peer + 1) * row).collect();
        self.staged_all_gather(Private::of_mut(&mut sizes), &rows)?;
        // The second exchange below starts at the same slots.
        self.synchronise()?;
        let size_of = |from: usize, to: usize| {
            let bytes = sizes[from * row + 8 * to..][..8].try_into().expect("eight bytes");
            u64::from_le_bytes(bytes) as usize
        };
        if let Some(peer) = (0..group.size).find(|peer| size_of(*peer, rank) != receive[*peer].len()) {
            let (sends, expects) = (size_of(peer, rank), receive[peer].len());
            let calls = [
                (peer, format!("sends {sends} bytes to {rank}")),
                (rank, format!("expects {expects} from {peer}")),
            ];
            return Err(self.mismatch(self.engine.sequence - 1, calls.into_iter()));
        }
        let longest = (0..group.size * group.size)
            .map(|n| size_of(n / group.size, n % group.size))
            .max()
            .unwrap_or(0);
        output
            .part(receive[rank].clone())
            .copy_between(&input.part(send[rank].clone()));
        let produce = |round| {
            for (peer, part) in send.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                input
                    .part(piece_of(part, round, share))
                    .copy_to(segment, slot(rank, round), peer * share);
            }
        };
        let consume = |round| {
            for (peer, part) in receive.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                output
                    .part(piece_of(part, round, share))
                    .copy_from(segment, slot(peer, round), rank * share);
            }
        };
        self.exchange(longest.div_ceil(share), produce, consume)
    }

    /// Produces and consumes `rounds` rounds in step with the peers.
    ///
    /// All slots are taken to be free: after entering, or after a synchronisation that follows another exchange.
    fn exchange(&mut self, rounds: usize, produce: impl Fn(usize), consume: impl Fn(usize)) -> Result<()> {
        let base = self.engine.epoch;
        if rounds > 0 {
            produce(0);
            self.publish();
        }
        for round in 0..rounds {
            if round + 1 < rounds {
                produce(round + 1);
                self.publish();
            }
            self.wait_for_all(base.wrapping_add(round as u32 + 1))?;
            consume(round);
        }
        Ok(())
    }
}

/// Returns how many bytes of a stage slot each of `size` peers gets.
fn share_of_slot(size: usize) -> usize {
    STAGE / size / LINE * LINE
}

/// Returns how to store a reduction of `own` and other inputs into `output`.
pub(super) fn temperature_of(own: *const u8, output: &Private) -> Temperature {
    // A result that replaces its own input is in cache already.
    let replaces_input = own == output.pointer().cast_const();
    if output.len() >= LARGE && !replaces_input {
        Temperature::Cold
    } else {
        Temperature::Warm
    }
}
