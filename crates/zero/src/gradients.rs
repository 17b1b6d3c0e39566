//! Gradients on their way: from the hooks into buckets, and from full buckets to the other ranks.
//!
//! # Protocol
//!
//! A bucket is *here* (this rank fills it) or *away* (its reduction runs behind the backward pass). Within one backward
//! that synchronises, a bucket leaves when all its parameters have come in **and** all buckets before it have left: so
//! every rank starts the same reductions in the same order, whatever order gradients arrive in. [`Gradients::finish`]
//! sends the rest off and waits for all to come back.
//!
//! Between two calls of [`Gradients::clear`] gradients of several backwards add up. The mean over ranks of an already
//! averaged part is that part, so backwards after a synchronised one may add to it.

use crate::layout::BucketLayout;
use crate::norm::sum_of_squares;
use crate::{Error, Result};
use candle_core::{CpuStorage, Storage, Tensor};
use rayon::prelude::*;
use sconce_collectives::{Buffer, Communicator, Pending, ReduceOp};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Elements copied or added by one task.
const BLOCK: usize = 1 << 16;

/// The gradient buckets of one model on one rank.
#[derive(Debug, Default)]
pub(crate) struct Gradients {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Set once the layout is known, before the first backward.
    communicator: Option<Arc<dyn Communicator>>,
    buckets: Vec<Bucket>,
    /// Bucket and slot of every parameter.
    places: Vec<(usize, usize)>,
    /// Buckets that have left in this backward.
    left: usize,
    synchronise: bool,
    /// Gradients that came in during this backward, by parameter.
    arrived: Vec<bool>,
    /// Whether the slot holds a gradient since the last clear, by parameter.
    holds: Vec<bool>,
    /// The error behind candle's, if a hook failed.
    failure: Option<Error>,
}

#[derive(Debug)]
struct Bucket {
    layout: BucketLayout,
    memory: Memory,
    /// Parameters that have not come in during this backward.
    missing: usize,
}

#[derive(Debug)]
enum Memory {
    Here(Buffer),
    Away(Pending<Buffer>),
    /// Lost in a failed reduction.
    Lost,
}

impl Gradients {
    /// Says whether the buckets have been laid out.
    pub(crate) fn is_laid_out(&self) -> bool {
        self.lock().communicator.is_some()
    }

    /// Allocates the buckets; called by all ranks with one layout.
    pub(crate) fn lay_out(
        &self,
        communicator: &Arc<dyn Communicator>,
        layouts: Vec<BucketLayout>,
        parameters: usize,
    ) -> Result<()> {
        let mut state = self.lock();
        state.places = vec![(0, 0); parameters];
        for (number, layout) in layouts.into_iter().enumerate() {
            for (slot, place) in layout.slots.iter().enumerate() {
                state.places[place.parameter] = (number, slot);
            }
            let memory = Memory::Here(communicator.allocate_elements::<f32>(layout.elements)?);
            state.buckets.push(Bucket {
                missing: 0,
                layout,
                memory,
            });
        }
        state.holds = vec![false; parameters];
        state.communicator = Some(Arc::clone(communicator));
        Ok(())
    }

    /// Prepares for a backward pass.
    pub(crate) fn begin(&self, synchronise: bool) {
        let mut state = self.lock();
        let state = &mut *state;
        state.synchronise = synchronise;
        state.left = 0;
        state.arrived = vec![false; state.places.len()];
        state.failure = None;
        for bucket in &mut state.buckets {
            bucket.missing = bucket.layout.slots.len();
        }
    }

    /// Takes a parameter's gradient of this backward; called by its hook.
    pub(crate) fn accept(&self, parameter: usize, gradient: &Tensor) -> candle_core::Result<()> {
        let mut state = self.lock();
        state.add(parameter, gradient)?;
        if let Err(error) = state.send_full_buckets() {
            let message = candle_core::Error::msg(&error);
            state.failure = Some(error);
            return Err(message);
        }
        Ok(())
    }

    /// Returns the numbers of the parameters whose gradient did not come in during this backward.
    pub(crate) fn missing(&self) -> Vec<usize> {
        let state = self.lock();
        state
            .arrived
            .iter()
            .enumerate()
            .filter(|(_, arrived)| !**arrived)
            .map(|(number, _)| number)
            .collect()
    }

    /// Ends a backward: if it synchronises, reduces what has not been reduced and waits for everything.
    pub(crate) fn finish(&self) -> Result<()> {
        let mut state = self.lock();
        if !state.synchronise {
            return Ok(());
        }
        let state = &mut *state;
        for number in 0..state.places.len() {
            if !state.arrived[number] && !state.holds[number] {
                state.slot_mut(number)?.fill(0.0);
            }
        }
        state.buckets.iter_mut().for_each(|bucket| bucket.missing = 0);
        state.send_full_buckets()?;
        for bucket in &mut state.buckets {
            bucket.memory = match std::mem::replace(&mut bucket.memory, Memory::Lost) {
                Memory::Away(pending) => Memory::Here(pending.wait()?),
                other => other,
            };
        }
        Ok(())
    }

    /// Returns and forgets the error that made a hook fail.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        self.lock().failure.take()
    }

    /// Says for each parameter whether it has got a gradient since the last clear.
    pub(crate) fn held(&self) -> Vec<bool> {
        self.lock().holds.clone()
    }

    /// Forgets all gradients.
    pub(crate) fn clear(&self) {
        self.lock().holds.fill(false);
    }

    /// Returns the sum of squares of all gradients held; padding and slots without gradient do not count.
    pub(crate) fn sum_of_squares(&self) -> Result<f64> {
        self.with_buckets(|buckets, holds| {
            let mut slices = Vec::new();
            for (layout, gradients) in buckets {
                let held = layout.slots.iter().filter(|slot| holds[slot.parameter]);
                slices.extend(held.map(|slot| &gradients[slot.range.clone()]));
            }
            sum_of_squares(&slices)
        })
    }

    /// Runs `work` on all buckets, which must be here, with a word on which parameters hold a gradient.
    pub(crate) fn with_buckets<R>(&self, work: impl FnOnce(&[(&BucketLayout, &[f32])], &[bool]) -> R) -> Result<R> {
        let state = self.lock();
        let view = |bucket| match bucket {
            &Bucket {
                ref layout,
                memory: Memory::Here(ref buffer),
                ..
            } => Ok((layout, &buffer.as_slice::<f32>()[..layout.elements])),
            _ => Err(Error::Order {
                what: "reading gradients",
                hint: "the last backward failed; start over",
            }),
        };
        let views: Vec<_> = state.buckets.iter().map(view).collect::<Result<_>>()?;
        Ok(work(&views, &state.holds))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn add(&mut self, parameter: usize, gradient: &Tensor) -> candle_core::Result<()> {
        let gradient = gradient.contiguous()?;
        let (storage, layout) = gradient.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
            candle_core::bail!(
                "gradient of a managed parameter is {} where f32 on the CPU was expected",
                gradient.dtype().as_str()
            );
        };
        let values = &values[layout.start_offset()..][..layout.shape().elem_count()];
        let is_first = !self.holds[parameter];
        let slot = self.slot_mut(parameter).map_err(candle_core::Error::wrap)?;
        let pairs = slot.par_chunks_mut(BLOCK).zip(values.par_chunks(BLOCK));
        if is_first {
            pairs.for_each(|(slot, values)| slot.copy_from_slice(values));
        } else {
            pairs.for_each(|(slot, values)| slot.iter_mut().zip(values).for_each(|(sum, value)| *sum += value));
        }
        self.holds[parameter] = true;
        if !std::mem::replace(&mut self.arrived[parameter], true) {
            self.buckets[self.places[parameter].0].missing -= 1;
        }
        Ok(())
    }

    fn slot_mut(&mut self, parameter: usize) -> Result<&mut [f32]> {
        let (bucket, slot) = self.places[parameter];
        let bucket = &mut self.buckets[bucket];
        match &mut bucket.memory {
            Memory::Here(buffer) => Ok(&mut buffer.as_mut_slice::<f32>()[bucket.layout.slots[slot].range.clone()]),
            _ => Err(Error::Order {
                what: "a gradient for a bucket that is being reduced",
                hint: "a parameter's gradient came twice in one backward; call backward once per graph",
            }),
        }
    }

    /// Starts the reduction of every bucket whose turn it is.
    fn send_full_buckets(&mut self) -> Result<()> {
        let Some(communicator) = self.communicator.clone().filter(|_| self.synchronise) else {
            return Ok(());
        };
        while self.left < self.buckets.len() && self.buckets[self.left].missing == 0 {
            let bucket = &mut self.buckets[self.left];
            bucket.memory = match std::mem::replace(&mut bucket.memory, Memory::Lost) {
                Memory::Here(buffer) => Memory::Away(communicator.run_behind(buffer, |buffer, group| {
                    group.all_reduce(buffer.as_mut_slice::<f32>(), ReduceOp::Mean)
                })),
                _ => {
                    return Err(Error::Order {
                        what: "backward",
                        hint: "an earlier backward failed; start over",
                    });
                }
            };
            self.left += 1;
        }
        Ok(())
    }
}
