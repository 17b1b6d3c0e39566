//! Operations on buffers in shared regions: every rank works on its part of all ranks' buffers, with no copies between.
//!
//! An all-reduce is one pass: each rank sums its part of all buffers and stores it into all of them. That moves two
//! bytes per payload byte and rank, where a copy moves three, since the lines written are those just read.

use super::group::Passage;
use super::region::Region;
use super::staged::temperature_of;
use crate::collective::Each;
use crate::copy::{LARGE, copy_past_cache, fence_past_cache};
use crate::parts::{Part, lines_of};
use crate::private::Private;
use crate::reduction::{Ranges, Temperature, reduce};
use crate::{ElementType, Elements, ReduceOp, Result};
use std::sync::Arc;

/// The buffers of all ranks in one operation, as mapped here.
#[derive(Debug)]
pub(super) struct Peers {
    addresses: Vec<*mut u8>,
    _regions: Vec<Arc<Region>>,
}

impl Passage<'_> {
    /// Returns all ranks' buffers of `bytes` bytes if all lie in shared regions.
    pub(super) fn peers(&self, sequence: u64, bytes: usize) -> Result<Option<Peers>> {
        let locations: Vec<_> = (0..self.group.size)
            .map(|rank| self.location_of(rank, sequence))
            .collect();
        if locations.contains(&0) {
            return Ok(None);
        }
        let resolve = |(rank, location)| self.engine.regions.resolve(rank, location, bytes);
        let resolved: Vec<_> = locations.into_iter().enumerate().map(resolve).collect::<Result<_>>()?;
        let (addresses, regions) = resolved.into_iter().unzip();
        Ok(Some(Peers {
            addresses,
            _regions: regions,
        }))
    }

    pub(super) fn in_place_all_reduce(
        &mut self,
        peers: &Peers,
        bytes: usize,
        element: ElementType,
        op: ReduceOp,
    ) -> Result<()> {
        let own = lines_of(bytes, self.group.rank, self.group.size);
        let output = |rank: usize| peers.addresses[rank].wrapping_add(own.start);
        let input = |rank: usize| output(rank).cast_const();
        let size = self.group.size;
        let (inputs, outputs) = (Ranges::new(size, &input), Ranges::new(size, &output));
        // SAFETY: all ranks have entered with these buffers and stay in this operation until the synchronisation
        // below; bytes `own` of all buffers are this rank's alone; a whole number of elements fits a cache line.
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
        self.synchronise()
    }

    pub(super) fn in_place_reduce_scatter(
        &mut self,
        peers: &Peers,
        target: Private,
        element: ElementType,
        op: ReduceOp,
        own: &Part,
    ) -> Result<()> {
        let input = |rank: usize| peers.addresses[rank].wrapping_add(own.start).cast_const();
        let temperature = temperature_of(input(self.group.rank), &target);
        let output = |_| target.pointer();
        let (inputs, outputs) = (Ranges::new(self.group.size, &input), Ranges::new(1, &output));
        // SAFETY: all ranks have entered and none writes its buffer before the synchronisation below, except bytes
        // `own` of this rank's, if `target` is there: those only this rank reads. `target` holds `own.len()` bytes.
        unsafe { reduce(element, op, inputs, outputs, own.len() / element.size(), temperature) };
        self.synchronise()
    }

    pub(super) fn in_place_all_gather(&mut self, peers: &Peers, own: &Part) -> Result<()> {
        let source = peers.addresses[self.group.rank].wrapping_add(own.start);
        for (rank, address) in peers.addresses.iter().enumerate() {
            if rank != self.group.rank {
                let target = address.wrapping_add(own.start);
                // SAFETY: all ranks have entered; bytes `own` of every buffer are this rank's to write until the
                // synchronisation below, and buffers of different ranks do not overlap.
                unsafe { copy(source, target, own.len()) };
            }
        }
        self.synchronise()
    }

    /// Hands every rank's input on; all have the size of this rank's.
    pub(super) fn in_place_all_gather_each(
        &mut self,
        peers: &Peers,
        input: Elements<'_>,
        each: Each<'_>,
    ) -> Result<()> {
        let (own, size) = (self.group.rank, self.group.size);
        // Each rank begins with another one, so that they do not all read the same memory.
        for rank in (0..size).map(|distance| (own + distance) % size) {
            // SAFETY: all ranks have entered with inputs of one size and type, which they only read before the
            // synchronisation below.
            let bytes = unsafe { std::slice::from_raw_parts(peers.addresses[rank], input.bytes().len()) };
            each.0(rank, Elements::of_bytes(input.element(), bytes));
        }
        self.synchronise()
    }

    pub(super) fn in_place_broadcast(&mut self, peers: &Peers, buffer: Private, root: usize) -> Result<()> {
        if self.group.rank != root {
            // SAFETY: all ranks have entered; the root does not write its buffer before the synchronisation below,
            // and ours is another rank's part.
            unsafe { copy(peers.addresses[root], buffer.pointer(), buffer.len()) };
        }
        self.synchronise()
    }
}

/// Copies between buffers of two ranks.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`].
unsafe fn copy(source: *const u8, target: *mut u8, bytes: usize) {
    if bytes < LARGE {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(source, target, bytes) };
    } else {
        // SAFETY: the caller's promise.
        unsafe { copy_past_cache(source, target, bytes) };
        fence_past_cache();
    }
}
