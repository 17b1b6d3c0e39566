//! Which bytes of a buffer belong to which rank, and in which pieces they move.

use crate::ElementType;
use crate::collective::Counts;
use std::ops::Range;

/// A rank's bytes within a buffer.
pub(crate) type Part = Range<usize>;

/// Bytes of a cache line: ranks' parts of one buffer start on different lines.
pub(crate) const LINE: usize = 64;

/// Returns every rank's part of a buffer.
pub(crate) fn parts(counts: Counts<'_>, element: ElementType, size: usize) -> Vec<Part> {
    let mut at = 0;
    let part = |rank| {
        let start = at;
        at += counts.of(rank) * element.size();
        start..at
    };
    (0..size).map(part).collect()
}

/// Returns `rank`'s part when `bytes` bytes are dealt out over `size` ranks by whole cache lines.
pub(crate) fn lines_of(bytes: usize, rank: usize, size: usize) -> Part {
    let lines = bytes.div_ceil(LINE).div_ceil(size) * LINE;
    (rank * lines).min(bytes)..((rank + 1) * lines).min(bytes)
}

/// Returns the bytes of `part` that round `round` moves in pieces of `piece` bytes.
pub(crate) fn piece_of(part: &Part, round: usize, piece: usize) -> Part {
    (part.start + round * piece).min(part.end)..(part.start + (round + 1) * piece).min(part.end)
}

/// Returns how many rounds of pieces of `piece` bytes move all of `parts`.
pub(crate) fn rounds_of(parts: &[Part], piece: usize) -> usize {
    parts.iter().map(|part| part.len().div_ceil(piece)).max().unwrap_or(0)
}
