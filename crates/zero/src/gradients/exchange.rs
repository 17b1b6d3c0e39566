//! How ranks get the values that others have updated for them: through the gradients' memory, bucket by bucket.

use super::{Gradients, INCOMPLETE, PASSING_BUFFERS, State};
use crate::bucket::Memory;
use crate::layout::BucketLayout;
use crate::{Placement, Residence, Result};
use candle_core::DType;
use half::{bf16, f16};
use sconce_collectives::{Buffer, Communicator, Counts, Element, Pending};
use std::collections::VecDeque;
use std::ops::Range;

impl Gradients {
    /// Gives every rank the other ranks' parts of what `own_part` says of its own, bucket by bucket, through the
    /// gradients' memory; the gradients are forgotten.
    ///
    /// `own_part` fills this rank's part of memory for a whole bucket of sharded state; `take` gets the whole bucket.
    pub(crate) fn exchange_parts(
        &self,
        own_part: impl Fn(&BucketLayout, &mut Buffer) -> Result<()>,
        take: impl Fn(&BucketLayout, &Buffer) -> Result<()>,
    ) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        let Some(communicator) = state.shard_group() else {
            return Ok(());
        };
        let is_exchanged = |layout: &BucketLayout| {
            let Placement {
                parameter,
                optimizer_state,
                ..
            } = layout.placement;
            (parameter, optimizer_state) == (Residence::Replicated, Residence::Sharded)
        };
        let numbers: Vec<_> = (0..state.buckets.len())
            .filter(|n| is_exchanged(&state.buckets[*n].layout))
            .collect();
        if numbers.is_empty() {
            return Ok(());
        }
        let mut under_way = VecDeque::new();
        for number in numbers {
            if under_way.len() == PASSING_BUFFERS {
                state.take_back(&mut under_way, &take)?;
            }
            let mut buffer = match std::mem::replace(&mut state.buckets[number].memory, Memory::Absent) {
                Memory::Here(buffer) => buffer,
                Memory::Absent => state.passing.pop().ok_or(INCOMPLETE)?,
                _ => return Err(INCOMPLETE),
            };
            let layout = &state.buckets[number].layout;
            own_part(layout, &mut buffer)?;
            let exchange = match layout.dtype {
                DType::F32 => exchange::<f32>,
                DType::BF16 => exchange::<bf16>,
                _ => exchange::<f16>,
            };
            let (elements, part_elements) = (layout.elements(), layout.part_elements);
            let pending = communicator.run_behind(buffer, move |buffer, group| {
                exchange(buffer, elements, part_elements, group)
            });
            under_way.push_back((number, pending));
        }
        while !under_way.is_empty() {
            state.take_back(&mut under_way, &take)?;
        }
        state.forget();
        Ok(())
    }
}

impl State {
    /// Waits for the exchange that was started first and hands its bucket on.
    fn take_back(
        &mut self,
        under_way: &mut VecDeque<(usize, Pending<Buffer>)>,
        take: &impl Fn(&BucketLayout, &Buffer) -> Result<()>,
    ) -> Result<()> {
        let Some((number, pending)) = under_way.pop_front() else {
            return Ok(());
        };
        let buffer = pending.wait()?;
        let bucket = &mut self.buckets[number];
        take(&bucket.layout, &buffer)?;
        if bucket.is_sharded() {
            self.passing.push(buffer);
        } else {
            bucket.memory = Memory::Here(buffer);
        }
        Ok(())
    }
}

/// Returns where elements of a bucket lie when they are values, in the dtype of its parameters.
pub(crate) fn bytes_of(layout: &BucketLayout, elements: Range<usize>) -> Range<usize> {
    let size = layout.dtype.size_in_bytes();
    elements.start * size..elements.end * size
}

fn exchange<T: Element>(
    buffer: &mut Buffer,
    elements: usize,
    part_elements: usize,
    group: &dyn Communicator,
) -> sconce_collectives::Result<()> {
    let values = &mut buffer.for_peers::<T>()[..elements];
    group.all_gather_in_place(values, Counts::Equal(part_elements))
}
