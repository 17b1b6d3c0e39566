//! Gradients that come from a device: on their way into a bucket's memory while the backward goes on.

use super::{CAME_TWICE, State};
use crate::Result;
use crate::bucket::{BLOCK, Bucket, Memory};
use crate::device::Reading;
use crate::storage::Elements;
use candle_core::Tensor;
use rayon::prelude::*;
use std::ops::Range;

/// Bytes of gradients that may be on their way into buckets which have not left.
const BYTES_ON_THEIR_WAY: usize = 64 << 20;

/// A gradient that a bucket waits for, and where it goes.
#[derive(Debug)]
pub(crate) struct Arrival {
    pub(crate) reading: Reading,
    /// Of every chunk, where it lies in the bucket, and its elements.
    pub(crate) places: Vec<(Range<usize>, Range<usize>)>,
    /// Whether there is nothing yet to add it to.
    pub(crate) is_first: bool,
}

impl Arrival {
    /// Waits for the gradient and puts it into the bucket's memory.
    pub(crate) fn land(self, bucket: &mut [f32]) -> candle_core::Result<()> {
        let Self {
            reading,
            places,
            is_first,
        } = self;
        reading.finish(|values| put(values.shared(), places.into_iter(), bucket, is_first))
    }
}

impl State {
    /// Takes a gradient on a device: puts it into its place there, or begins to copy it, to be put there later.
    pub(super) fn take_from_device(&mut self, parameter: usize, gradient: &Tensor) -> Result<()> {
        let is_first = self.make_room(parameter)?;
        let (number, slot) = self.places[parameter];
        let has_left = number < self.left && self.is_reduced_now(number);
        let bucket = &mut self.buckets[number];
        let Memory::Here(buffer) = &mut bucket.memory else {
            return Err(CAME_TWICE);
        };
        if has_left {
            return Err(CAME_TWICE);
        }
        if let Some(gpu) = self.staging.any_gpu().filter(|gpu| gpu.reaches(gradient))
            && buffer.is_unified()
        {
            let place = (&bucket.layout, &bucket.layout.slots[slot]);
            gpu.place(gradient, place, buffer, is_first)?;
            (self.holds[parameter], self.arrived[parameter]) = (true, true);
            return Ok(());
        }
        bucket.arrivals.push(Arrival {
            reading: self.staging.read(gradient)?,
            places: bucket.layout.places(&bucket.layout.slots[slot]).collect(),
            is_first,
        });
        self.is_from_device = true;
        (self.holds[parameter], self.arrived[parameter]) = (true, true);
        let on_their_way = self.buckets.iter().map(Bucket::bytes_on_their_way);
        if on_their_way.sum::<usize>() > BYTES_ON_THEIR_WAY {
            self.buckets.iter_mut().try_for_each(Bucket::land)?;
        }
        Ok(())
    }
}

/// Puts a gradient into its places in a bucket's memory, or adds it to what is there.
pub(super) fn put(
    values: Elements<'_>,
    places: impl Iterator<Item = (Range<usize>, Range<usize>)>,
    bucket: &mut [f32],
    is_first: bool,
) {
    for (place, chunk) in places {
        let blocks = bucket[place].par_chunks_mut(BLOCK).enumerate();
        blocks.for_each(|(number, slot)| {
            let start = chunk.start + number * BLOCK;
            let values = values.slice(start..start + slot.len());
            if is_first {
                values.copy_to(slot);
            } else {
                values.add_to(slot);
            }
        });
    }
}
