//! Work on rows, split into blocks over the threads.
//!
//! The split depends on the shape alone. Sums over rows are taken inside a block in order, and then
//! over the blocks in order, so that results do not depend on the number of threads.

use rayon::prelude::*;

/// Elements that are worth a task of their own: some 10 µs of work.
const BLOCK_ELEMENTS: usize = 16 * 1024;

/// An upper bound on the blocks of a sum over rows: it bounds the memory for their partial sums, and
/// the threads that can take part.
const SUMMED_BLOCKS: usize = 128;

/// Returns the rows of a block where every row is its own result.
pub(super) fn independent(width: usize) -> usize {
    (BLOCK_ELEMENTS / width.max(1)).max(1)
}

/// Returns the rows of a block where rows are summed.
pub(super) fn summed(rows: usize, width: usize) -> usize {
    independent(width).max(rows.div_ceil(SUMMED_BLOCKS))
}

/// Calls `work(index, block)` for each block of `length` elements.
pub(super) fn for_each<A: Send>(a: &mut [A], length: usize, work: impl Fn(usize, &mut [A]) + Sync) {
    // A single block stays on this thread: waking another costs more.
    if a.len() <= length {
        if !a.is_empty() {
            work(0, a);
        }
    } else {
        a.par_chunks_mut(length)
            .enumerate()
            .for_each(|(index, a)| work(index, a));
    }
}

/// Calls `work(index, a_block, b_block)` for matching blocks of two slices.
pub(super) fn for_each_pair<A: Send, B: Send>(
    (a, a_length): (&mut [A], usize),
    (b, b_length): (&mut [B], usize),
    work: impl Fn(usize, &mut [A], &mut [B]) + Sync,
) {
    if a.len() <= a_length {
        if !a.is_empty() {
            work(0, a, b);
        }
    } else {
        a.par_chunks_mut(a_length)
            .zip(b.par_chunks_mut(b_length))
            .enumerate()
            .for_each(|(index, (a, b))| work(index, a, b));
    }
}

/// Adds up rows of `width` partial sums, in order.
pub(super) fn sum_rows(partials: &[f32], width: usize) -> Vec<f32> {
    let mut total = vec![0f32; width];
    for partial in partials.chunks_exact(width.max(1)) {
        for (total, &partial) in total.iter_mut().zip(partial) {
            *total += partial;
        }
    }
    total
}
