//! Changes of all gradients that are held: scaling and clamping.

use super::State;
use crate::Result;
use crate::bucket::{BLOCK, Memory};
use crate::device::{FlatMemory, Gpu};
use crate::overflow::is_finite;
use rayon::prelude::*;
use sconce_collectives::Buffer;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// What is done with every element.
#[derive(Debug, Clone, Copy)]
pub(super) enum Change {
    /// It is multiplied.
    Scale(f32),
    /// Its magnitude is limited; what is not a number stays so.
    Clamp(f32),
}

impl Change {
    /// Changes elements; says whether those that are clamped were finite.
    fn run(self, values: &mut [f32]) -> bool {
        let finite = AtomicBool::new(true);
        values.par_chunks_mut(BLOCK).for_each(|block| match self {
            Self::Scale(factor) => block.iter_mut().for_each(|value| *value *= factor),
            Self::Clamp(limit) => {
                if !is_finite(block) {
                    finite.store(false, Relaxed);
                }
                block.iter_mut().for_each(|value| *value = value.clamp(-limit, limit));
            }
        });
        finite.into_inner()
    }

    /// Does so on the GPU.
    fn run_on(self, gpu: &Gpu, pieces: Vec<(&mut Buffer, Vec<Range<usize>>)>) -> Result<bool> {
        match self {
            Self::Clamp(limit) => gpu.clamp(pieces, limit),
            Self::Scale(factor) => {
                for (buffer, ranges) in pieces {
                    ranges
                        .into_iter()
                        .try_for_each(|range| gpu.scale(buffer, range, factor))?;
                }
                Ok(true)
            }
        }
    }
}

impl State {
    /// Changes the gradients held; padding is left alone, anything may be in it. Says whether those that are clamped were
    /// finite.
    pub(super) fn change_held(&mut self, change: Change) -> Result<bool> {
        let rank = self.rank();
        let mut on_device = Vec::new();
        let mut finite = true;
        for bucket in &mut self.buckets {
            let layout = &bucket.layout;
            let slots = layout.slots.iter().filter(|slot| self.holds[slot.parameter]);
            match &mut bucket.memory {
                Memory::Here(buffer) => {
                    let of_slot = |slot| (0..layout.parts).map(move |part| layout.place(slot, part));
                    let places = Vec::from_iter(slots.flat_map(of_slot));
                    if buffer.is_unified() {
                        on_device.push((buffer, places));
                    } else {
                        let elements = buffer.as_mut_slice::<f32>();
                        places
                            .into_iter()
                            .for_each(|place| finite &= change.run(&mut elements[place]));
                    }
                }
                _ if bucket.shard_holds => {
                    let places = Vec::from_iter(slots.map(|slot| slot.within_part(rank)));
                    match &mut bucket.shard {
                        FlatMemory::Device(shard) => on_device.push((shard, places)),
                        FlatMemory::Host(shard) => {
                            places
                                .into_iter()
                                .for_each(|place| finite &= change.run(&mut shard[place]));
                        }
                    }
                }
                _ => {}
            }
        }
        match self.staging.any_gpu() {
            Some(gpu) if !on_device.is_empty() => Ok(change.run_on(gpu, on_device)? && finite),
            _ => Ok(finite),
        }
    }
}
