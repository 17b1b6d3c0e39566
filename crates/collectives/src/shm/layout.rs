//! Where things lie in a group's control segment.
//!
//! ```text
//! Control | one line per rank | small slots | stage slots | mailboxes
//! ```

use std::sync::atomic::{AtomicU32, AtomicU64};

/// Largest contribution of one rank, in bytes, that travels in one step through its small slot.
pub(super) const SMALL: usize = 8 << 10;
/// Small slots per rank: an operation's slot is read until all ranks have entered the next one.
pub(super) const SMALL_SLOTS: usize = 2;
/// Bytes of one stage slot: large enough to amortise a synchronisation, small enough that all stay in cache.
pub(super) const STAGE: usize = 256 << 10;
/// Stage slots per rank; see the module page for why four.
pub(super) const STAGE_SLOTS: usize = 4;
/// Bytes of one mailbox piece.
pub(super) const PIECE: usize = 64 << 10;
/// Pieces of a mailbox.
pub(super) const PIECES: usize = 2;
/// Longest failure message kept in the segment, in bytes.
pub(super) const MESSAGE: usize = 2048;

const PAGE: usize = 4096;

/// Words that all ranks share.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Control {
    /// Tells a segment of this build and run from anything else.
    pub(super) magic: AtomicU64,
    /// Ranks asleep on any word of the segment.
    pub(super) sleepers: Padded,
    /// 0 none, 1 being written, 2 readable.
    pub(super) failure: AtomicU32,
    /// The rank that failed first.
    pub(super) failed_rank: AtomicU32,
    /// Bytes of the message.
    pub(super) failure_length: AtomicU32,
    /// The message, as bytes in words.
    pub(super) failure_text: [AtomicU64; MESSAGE / 8],
}

/// A word on cache lines of its own.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Padded(pub(super) AtomicU32);

/// What one rank publishes; on cache lines of its own.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct RankLine {
    /// Steps published so far, wrapping; the word on which peers wait.
    pub(super) epoch: AtomicU32,
    /// One of the `PRESENCE` values.
    pub(super) presence: AtomicU32,
    /// Process id, for the liveness check.
    pub(super) process: AtomicU32,
    /// Collectives entered so far, wrapping.
    pub(super) entered: AtomicU32,
    /// Signature and buffer location of the current and the previous collective.
    pub(super) calls: [Call; 2],
}

/// A rank's announcement of one collective.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Call {
    /// The packed signature.
    pub(super) signature: AtomicU64,
    /// The signature's count.
    pub(super) count: AtomicU64,
    /// Where the buffer lies in shared regions, or 0.
    pub(super) location: AtomicU64,
}

/// The rank has not attached yet.
pub(super) const ABSENT: u32 = 0;
/// The rank has attached.
pub(super) const PRESENT: u32 = 1;
/// The rank has dropped its communicator.
pub(super) const LEFT: u32 = 2;

/// Offsets in a segment for a group of `ranks` ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub(super) ranks: usize,
}

impl Layout {
    fn lines(self) -> usize {
        size_of::<Control>().next_multiple_of(PAGE)
    }

    pub(super) fn line(self, rank: usize) -> usize {
        self.lines() + rank * size_of::<RankLine>()
    }

    fn smalls(self) -> usize {
        self.line(self.ranks).next_multiple_of(PAGE)
    }

    /// Returns the small slot of `rank` for collective number `sequence`.
    pub(super) fn small(self, rank: usize, sequence: u64) -> usize {
        self.smalls() + (rank * SMALL_SLOTS + sequence as usize % SMALL_SLOTS) * SMALL
    }

    fn stages(self) -> usize {
        self.smalls() + self.ranks * SMALL_SLOTS * SMALL
    }

    /// Returns the stage slot of `rank` for round number `round` of a collective.
    pub(super) fn stage(self, rank: usize, round: usize) -> usize {
        self.stages() + (rank * STAGE_SLOTS + round % STAGE_SLOTS) * STAGE
    }

    fn mailboxes(self) -> usize {
        self.stages() + self.ranks * STAGE_SLOTS * STAGE
    }

    /// Returns the mailbox for messages `from` one rank `to` another: two counter lines, then the pieces.
    pub(super) fn mailbox(self, from: usize, to: usize) -> usize {
        self.mailboxes() + (from * self.ranks + to) * (PAGE + PIECES * PIECE)
    }

    pub(super) fn mailbox_signature(self, from: usize, to: usize, piece: usize) -> usize {
        self.mailbox(from, to) + 256 + (piece % PIECES) * 16
    }

    pub(super) fn mailbox_piece(self, from: usize, to: usize, piece: usize) -> usize {
        self.mailbox(from, to) + PAGE + (piece % PIECES) * PIECE
    }

    pub(super) fn bytes(self) -> usize {
        self.mailbox(self.ranks, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_do_not_overlap_and_fit_the_segment() {
        for ranks in [1, 2, 3, 7] {
            let layout = Layout { ranks };
            let mut ranges = vec![(0, size_of::<Control>())];
            for rank in 0..ranks {
                ranges.push((layout.line(rank), size_of::<RankLine>()));
                ranges.extend((0..SMALL_SLOTS).map(|s| (layout.small(rank, s as u64), SMALL)));
                ranges.extend((0..STAGE_SLOTS).map(|s| (layout.stage(rank, s), STAGE)));
                for to in 0..ranks {
                    ranges.push((layout.mailbox(rank, to), 256));
                    ranges.extend((0..PIECES).map(|p| (layout.mailbox_signature(rank, to, p), 16)));
                    ranges.extend((0..PIECES).map(|p| (layout.mailbox_piece(rank, to, p), PIECE)));
                }
            }
            ranges.sort_unstable();
            for pair in ranges.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?}");
            }
            let last = ranges[ranges.len() - 1];
            assert!(last.0 + last.1 <= layout.bytes());
            assert_eq!(layout.line(1) % 128, 0);
        }
    }
}
