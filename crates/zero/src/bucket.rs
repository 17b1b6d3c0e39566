//! One bucket of gradients: its memory on the way, and the reduced parts that a rank holds of it.

use crate::device::{FlatMemory, Gpu, NormPiece, Spread};
use crate::gradients::{Arrival, Compression};
use crate::layout::{BucketLayout, Slot};
use crate::{Residence, Result};
use rayon::prelude::*;
use sconce_collectives::{Buffer, Pending};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Elements copied or added by one task.
pub(crate) const BLOCK: usize = 1 << 16;

/// One bucket of gradients on one rank.
#[derive(Debug)]
pub(crate) struct Bucket {
    pub(crate) layout: BucketLayout,
    pub(crate) memory: Memory,
    /// This rank's part of a sharded gradient, and whether it holds one since the last clear.
    pub(crate) shard: FlatMemory,
    pub(crate) shard_holds: bool,
    /// Parameters that have not come in during this backward.
    pub(crate) missing: usize,
    /// Gradients that have, but are still on their way from a device, in order.
    pub(crate) arrivals: Vec<Arrival>,
    /// How gradients are compressed on their way to other ranks.
    pub(crate) compression: Option<Arc<Mutex<Compression>>>,
}

/// Where the memory is that a bucket's gradients come into.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Nowhere: a sharded gradient has not begun to come in.
    Absent,
    /// On this rank, which fills it.
    Here(Buffer),
    /// Under way: a reduction has it.
    Away(Pending<Away>),
    /// Lost in a failed reduction.
    Lost,
}

/// What a reduction has.
#[derive(Debug)]
pub(crate) struct Away {
    pub(crate) buffer: Buffer,
    /// Whether all gradients that were on their way have come.
    pub(crate) landed: Result<()>,
}

impl Bucket {
    /// `gpu` is where the shard is to lie, if it is on one.
    pub(crate) fn new(
        layout: BucketLayout,
        gpu: Option<&Gpu>,
        allocate: impl FnOnce(usize) -> Result<Buffer>,
    ) -> Result<Self> {
        let mut bucket = Self {
            missing: 0,
            arrivals: Vec::new(),
            compression: None,
            memory: Memory::Absent,
            shard: FlatMemory::default(),
            shard_holds: false,
            layout,
        };
        if bucket.is_sharded() {
            bucket.shard = FlatMemory::filled(gpu, 0.0, bucket.layout.part_elements)?;
        } else {
            bucket.memory = Memory::Here(allocate(bucket.layout.elements())?);
        }
        Ok(bucket)
    }

    /// Waits for the gradients that are on their way from a device.
    pub(crate) fn land(&mut self) -> Result<()> {
        if self.arrivals.is_empty() {
            return Ok(());
        }
        let arrivals = std::mem::take(&mut self.arrivals);
        match &mut self.memory {
            Memory::Here(buffer) => {
                let elements = buffer.as_mut_slice();
                let mut arrivals = arrivals.into_iter();
                Ok(arrivals.try_for_each(|arrival| arrival.land(elements))?)
            }
            // Gradients come only into memory that is here, and it stays until they have landed.
            _ => Ok(()),
        }
    }

    /// Returns the bytes of the gradients that are on their way.
    pub(crate) fn bytes_on_their_way(&self) -> usize {
        self.arrivals.iter().map(|arrival| arrival.reading.bytes()).sum()
    }

    /// Says whether the gradient is sharded.
    pub(crate) fn is_sharded(&self) -> bool {
        self.layout.placement.gradient == Residence::Sharded
    }

    /// Says whether the optimizer state is sharded, so that each rank needs the reduction of its part only.
    pub(crate) fn is_stepped_by_parts(&self) -> bool {
        self.layout.placement.optimizer_state == Residence::Sharded
    }

    /// Adds this rank's part of a reduced bucket to its shard.
    pub(crate) fn add_to_shard(&mut self, reduced: &Buffer, own: Range<usize>, gpu: Option<&Gpu>) -> Result<()> {
        let is_first = !std::mem::replace(&mut self.shard_holds, true);
        if let (Some(gpu), Some(shard)) = (gpu, self.shard.on_device_mut())
            && reduced.is_unified()
        {
            return gpu.add((reduced, own.start), shard, own.len(), is_first);
        }
        let reduced = &reduced.as_slice::<f32>()[own];
        let pairs = self
            .shard
            .as_mut_slice()
            .par_chunks_mut(BLOCK)
            .zip(reduced.par_chunks(BLOCK));
        if !is_first {
            pairs.for_each(|(sum, values)| sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value));
        } else {
            pairs.for_each(|(sum, values)| sum.copy_from_slice(values));
        }
        Ok(())
    }

    /// Returns the parts that rank `rank` holds; all of them while gradients are `local`, or `None` when the memory is
    /// away or lost.
    pub(crate) fn held(&self, rank: usize, local: bool) -> Option<Held<'_>> {
        let layout = &self.layout;
        match &self.memory {
            Memory::Here(buffer) => {
                let parts = if local || !self.is_stepped_by_parts() {
                    0..layout.parts
                } else {
                    rank..rank + 1
                };
                Some(Held {
                    layout,
                    memory: HeldMemory::Bucket(buffer, layout.part(parts.start).start),
                    parts,
                })
            }
            Memory::Absent => Some(Held {
                layout,
                parts: rank..rank + 1,
                memory: HeldMemory::Shard(&self.shard),
            }),
            Memory::Away(_) | Memory::Lost => None,
        }
    }
}

/// The reduced gradients of one bucket: those parts that this rank holds.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    pub(crate) layout: &'a BucketLayout,
    /// The first part held; all, or this rank's alone.
    pub(crate) parts: Range<usize>,
    memory: HeldMemory<'a>,
}

/// Where they are.
#[derive(Debug)]
enum HeldMemory<'a> {
    /// In the bucket's memory, from an element on.
    Bucket(&'a Buffer, usize),
    Shard(&'a FlatMemory),
}

impl Held<'_> {
    /// Returns the gradient of a slot's elements in a part that is held, for the host.
    pub(crate) fn gradient(&self, slot: &Slot, part: usize) -> &[f32] {
        let place = self.place(slot, part);
        match self.memory {
            HeldMemory::Bucket(buffer, start) => &buffer.as_slice()[start + place.start..start + place.end],
            HeldMemory::Shard(shard) => &shard.as_slice()[place],
        }
    }

    /// Returns the memory that kernels work on, and which of its elements are that gradient, if it is such.
    pub(crate) fn on_device(&self, slot: &Slot, part: usize) -> Option<(&Buffer, Range<usize>)> {
        let place = self.place(slot, part);
        match self.memory {
            HeldMemory::Bucket(buffer, start) => buffer
                .is_unified()
                .then_some((buffer, start + place.start..start + place.end)),
            HeldMemory::Shard(shard) => Some((shard.on_device()?, place)),
        }
    }

    /// Returns all that is held of a slot's gradient for a norm of each part, if kernels work on it.
    pub(crate) fn norm_piece(&self, slot: &Slot) -> Option<NormPiece<'_>> {
        let (memory, first) = self.on_device(slot, self.parts.start)?;
        let chunks = self.parts.len();
        Some(NormPiece {
            memory,
            start: first.start,
            count: self.parts.clone().map(|part| slot.chunk(part).len()).sum(),
            spread: match chunks {
                1 => Spread::together(first.len()),
                _ => Spread::of(self.layout, slot),
            },
            chunks,
        })
    }

    /// Returns where a slot's elements in a part lie in arrays that cover the parts held.
    pub(crate) fn place(&self, slot: &Slot, part: usize) -> Range<usize> {
        let place = self.layout.place(slot, part);
        let start = self.layout.part(self.parts.start).start;
        place.start - start..place.end - start
    }

    /// Returns the number of elements of arrays that cover the parts held.
    pub(crate) fn elements(&self) -> usize {
        self.parts.len() * self.layout.part_elements
    }
}
