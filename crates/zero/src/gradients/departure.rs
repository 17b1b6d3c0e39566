//! How buckets leave for other ranks, and come back: where their memory comes from, what is reduced, and when.

use super::reduction::Reduction;
use super::{AWAY_FROM_A_DEVICE, CAME_TWICE, INCOMPLETE, State};
use crate::bucket::{Away, Bucket, Memory};
use crate::device::FlatMemory;
use crate::layout::Slot;
use crate::mesh::Mesh;
use crate::{Error, Result};
use candle_core::DType;
use sconce_collectives::Buffer;
use std::sync::{Arc, PoisonError};

impl State {
    /// Gives a bucket of sharded gradients a buffer to fill.
    pub(super) fn make_present(&mut self, number: usize) -> Result<()> {
        if !matches!(self.buckets[number].memory, Memory::Absent) || self.buckets[number].missing == 0 {
            return Ok(());
        }
        if self.passing.is_empty() {
            let away = (0..self.left).find(|earlier| matches!(self.buckets[*earlier].memory, Memory::Away(_)));
            let waiting = away.filter(|earlier| self.buckets[*earlier].is_sharded());
            waiting.map_or(Ok(()), |earlier| self.bring_back(earlier))?;
        }
        // All are being filled when this rank's graph is ordered otherwise than rank 0's: private memory serves too.
        let bytes = self.buckets[number].layout.elements() * size_of::<f32>();
        let buffer = match (self.passing.pop(), self.staging.any_gpu()) {
            (Some(buffer), _) => buffer,
            (None, Some(gpu)) if self.passes_on_gpu => gpu.allocate(bytes)?,
            (None, _) => Buffer::on_heap(bytes),
        };
        self.buckets[number].memory = Memory::Here(buffer);
        Ok(())
    }

    /// Fills the slots of a bucket with zeros for which no gradient has come.
    pub(super) fn zero_what_is_missing(&mut self, number: usize) -> Result<()> {
        let is_sharded = self.buckets[number].is_sharded();
        if is_sharded {
            self.make_present(number)?;
        }
        let Bucket { layout, memory, .. } = &mut self.buckets[number];
        let is_missing = |slot: &&Slot| {
            let parameter = slot.parameter;
            !self.arrived[parameter] && (is_sharded || !self.holds[parameter])
        };
        for slot in layout.slots.iter().filter(is_missing) {
            let Memory::Here(buffer) = memory else {
                return Err(CAME_TWICE);
            };
            let mut places = layout.places(slot).map(|(place, _)| place);
            match self.staging.any_gpu().filter(|_| buffer.is_unified()) {
                Some(gpu) => places.try_for_each(|place| gpu.zero(buffer, place))?,
                None => {
                    let elements = buffer.as_mut_slice::<f32>();
                    places.for_each(|place| elements[place].fill(0.0));
                }
            }
        }
        Ok(())
    }

    /// Makes the parts that this rank holds the mean over the groups of ranks that shard, each of which has its own.
    pub(super) fn join_replicas(&mut self) -> Result<()> {
        let rank = self.rank();
        let Some(replicas) = self.mesh.as_ref().and_then(|mesh| mesh.replicas.clone()) else {
            return Ok(());
        };
        let dtype = self.reduce_dtype.unwrap_or(DType::F32);
        for bucket in self.buckets.iter_mut().filter(|bucket| bucket.is_stepped_by_parts()) {
            let part = bucket.layout.part(rank);
            let (memory, part) = match (&mut bucket.memory, &mut bucket.shard) {
                (Memory::Here(buffer), _) => (buffer, part),
                (_, FlatMemory::Device(shard)) => (shard, 0..part.len()),
                (_, FlatMemory::Host(shard)) => {
                    Reduction::All.run(shard, dtype, &*replicas)?;
                    continue;
                }
            };
            match self.staging.any_gpu().filter(|_| memory.is_unified()) {
                Some(gpu) => Reduction::All.run_on(gpu, (memory, part), dtype, &*replicas)?,
                None => Reduction::All.run(&mut memory.as_mut_slice()[part], dtype, &*replicas)?,
            }
        }
        Ok(())
    }

    /// Starts the reduction of every bucket whose turn it is; `is_end` where no more gradients come.
    pub(super) fn send_full_buckets(&mut self, is_end: bool) -> Result<()> {
        let Some(mesh) = self.mesh.clone() else {
            return Ok(());
        };
        while self.left < self.buckets.len() {
            if self.is_reduced_now(self.left) {
                let is_missing = |number: usize| self.buckets.get(number).is_some_and(|bucket| bucket.missing > 0);
                let waits_for_next = self.is_from_device && !is_end && is_missing(self.left + 1);
                if is_missing(self.left) || waits_for_next {
                    return Ok(());
                }
                if self.is_from_device && self.left >= AWAY_FROM_A_DEVICE {
                    self.bring_back(self.left - AWAY_FROM_A_DEVICE)?;
                }
                self.send(self.left, &mesh)?;
            }
            self.left += 1;
        }
        Ok(())
    }

    /// Starts the reduction of a bucket.
    fn send(&mut self, number: usize, mesh: &Mesh) -> Result<()> {
        let bucket = &mut self.buckets[number];
        let layout = &bucket.layout;
        let (elements, part_elements) = (layout.elements(), layout.part_elements);
        let (reduction, group) = if bucket.is_stepped_by_parts() {
            (Reduction::Scatter(part_elements), &mesh.shard)
        } else {
            (Reduction::All, &mesh.world)
        };
        let dtype = self.reduce_dtype.unwrap_or(DType::F32);
        let compression = bucket.compression.clone();
        let loss_scale = self.loss_scale;
        let Memory::Here(buffer) = std::mem::replace(&mut bucket.memory, Memory::Lost) else {
            return Err(INCOMPLETE);
        };
        let arrivals = std::mem::take(&mut bucket.arrivals);
        let landed = Ok(());
        let staging = Arc::clone(&self.staging);
        let pending = group.run_behind(Away { buffer, landed }, move |away, group| {
            if !arrivals.is_empty() {
                let gradients = away.buffer.as_mut_slice();
                if let Err(error) = arrivals.into_iter().try_for_each(|arrival| arrival.land(gradients)) {
                    // Peers wait for this rank's gradients.
                    group.abort(&error.to_string());
                    away.landed = Err(error.into());
                    return Ok(());
                }
            }
            let _span = tracing::debug_span!("reduce bucket", what = number, elements).entered();
            if let Some(gpu) = staging.any_gpu().filter(|_| away.buffer.is_unified())
                && compression.is_none()
            {
                let outcome = reduction.run_on(gpu, (&mut away.buffer, 0..elements), dtype, group);
                if let Err(error) = &outcome {
                    // Peers wait for this rank's gradients; a group that has failed is told nothing new.
                    group.abort(&error.to_string());
                }
                return match outcome {
                    Err(Error::Collectives(error)) => Err(error),
                    outcome => {
                        away.landed = outcome;
                        Ok(())
                    }
                };
            }
            let gradients = &mut away.buffer.as_mut_slice()[..elements];
            match compression {
                Some(state) => {
                    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
                    state.run(gradients, loss_scale, dtype, group)
                }
                None => reduction.run(gradients, dtype, group),
            }
        });
        bucket.memory = Memory::Away(pending);
        Ok(())
    }

    /// Waits for a bucket that is away; a sharded gradient is added to its shard.
    pub(super) fn bring_back(&mut self, number: usize) -> Result<()> {
        let rank = self.rank();
        let bucket = &mut self.buckets[number];
        if !matches!(bucket.memory, Memory::Away(_)) {
            return Ok(());
        }
        let Memory::Away(pending) = std::mem::replace(&mut bucket.memory, Memory::Lost) else {
            return Ok(());
        };
        let span = tracing::debug_span!("wait for bucket", what = number).entered();
        let Away { buffer, landed } = pending.wait()?;
        drop(span);
        landed?;
        if !bucket.is_sharded() {
            bucket.memory = Memory::Here(buffer);
            return Ok(());
        }
        let own = bucket.layout.part(rank);
        bucket.add_to_shard(&buffer, own, self.staging.any_gpu())?;
        bucket.memory = Memory::Absent;
        let (count, bytes, is_shared) = self.pool;
        if self.passing.len() < count && (buffer.len(), buffer.is_shared()) == (bytes, is_shared) {
            self.passing.push(buffer);
        }
        Ok(())
    }
}
