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
//!
//! What is held goes through these phases:
//!
//! | phase | means | next |
//! | --- | --- | --- |
//! | empty | nothing is held | running |
//! | running | a backward is under way; only now do hooks deliver | local, synchronised or failed |
//! | local | this rank's own gradients are in it | running, empty |
//! | synchronised | the same on all ranks, and so is which parameters hold one | running, empty |
//! | failed | incomplete or lost; nothing may be read | none |

use crate::layout::BucketLayout;
use crate::norm::sum_of_squares;
use crate::{Error, Result};
use candle_core::{CpuStorage, Storage, Tensor};
use rayon::prelude::*;
use sconce_collectives::{Buffer, Communicator, Pending, ReduceOp};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Elements copied or added by one task.
const BLOCK: usize = 1 << 16;

const INCOMPLETE: Error = Error::Order {
    what: "gradients are incomplete",
    hint: "the last backward failed; correct its cause and start over with a new engine",
};

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
    phase: Phase,
    /// What the gradients held are to be multiplied with, from clipping.
    scale: f32,
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

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Phase {
    #[default]
    Empty,
    Running,
    Local,
    Synchronised,
    Failed,
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
        state.scale = 1.0;
        state.communicator = Some(Arc::clone(communicator));
        Ok(())
    }

    /// Prepares for a backward pass; gradients held from earlier ones are scaled as clipping asked.
    pub(crate) fn begin(&self, synchronise: bool) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        state.check_complete()?;
        state.apply_scale()?;
        state.phase = Phase::Running;
        state.synchronise = synchronise;
        state.left = 0;
        state.arrived = vec![false; state.places.len()];
        state.failure = None;
        for bucket in &mut state.buckets {
            bucket.missing = bucket.layout.slots.len();
        }
        Ok(())
    }

    /// Takes a parameter's gradient of this backward; called by its hook.
    pub(crate) fn accept(&self, parameter: usize, gradient: &Tensor) -> candle_core::Result<()> {
        let mut state = self.lock();
        let outcome = state.add(parameter, gradient).and_then(|()| state.send_full_buckets());
        if let Err(error) = outcome {
            let message = candle_core::Error::msg(&error);
            state.failure = Some(error);
            return Err(message);
        }
        Ok(())
    }

    /// Gives up the backward under way; what is held is incomplete from now on.
    pub(crate) fn fail(&self) {
        self.lock().phase = Phase::Failed;
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
    ///
    /// With `may_be_unused` ranks also agree on which parameters hold a gradient: those that any rank used.
    pub(crate) fn finish(&self, may_be_unused: bool) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        if !state.synchronise {
            state.phase = Phase::Local;
            return Ok(());
        }
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
        if let Some(communicator) = state.communicator.clone().filter(|_| may_be_unused) {
            let mut held: Vec<u8> = state.holds.iter().map(|held| u8::from(*held)).collect();
            communicator.all_reduce(&mut held, ReduceOp::Max)?;
            state.holds = held.iter().map(|held| *held != 0).collect();
        }
        state.phase = Phase::Synchronised;
        Ok(())
    }

    /// Returns and forgets the error that made a hook fail.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        self.lock().failure.take()
    }

    /// Forgets all gradients.
    pub(crate) fn clear(&self) {
        let mut state = self.lock();
        state.holds.fill(false);
        state.scale = 1.0;
        if state.phase != Phase::Failed {
            state.phase = Phase::Empty;
        }
    }

    /// Fails unless gradients are held that are the same on all ranks.
    pub(crate) fn check_synchronised(&self) -> Result<()> {
        let state = self.lock();
        state.check_complete()?;
        let hint = match state.phase {
            Phase::Synchronised => return Ok(()),
            Phase::Local => {
                "the last backward kept its gradients on this rank; the last one before a step must synchronise"
            }
            _ => "there are no gradients; call backward first, and zero_grad only after the step",
        };
        Err(Error::Order { what: "step", hint })
    }

    /// Scales all gradients held; takes effect where they are used.
    pub(crate) fn scale_by(&self, factor: f32) {
        self.lock().scale *= factor;
    }

    /// Returns the factor by which the gradients that [`Gradients::with_buckets`] shows are still to be multiplied.
    pub(crate) fn scale(&self) -> f32 {
        self.lock().scale
    }

    /// Returns the L2 norm of all gradients held; padding and slots without gradient do not count.
    pub(crate) fn norm(&self) -> Result<f64> {
        let scale = f64::from(self.scale());
        self.with_buckets(|buckets, holds| {
            let mut slices = Vec::new();
            for (layout, gradients) in buckets {
                let held = layout.slots.iter().filter(|slot| holds[slot.parameter]);
                slices.extend(held.map(|slot| &gradients[slot.range.clone()]));
            }
            sum_of_squares(&slices).sqrt() * scale
        })
    }

    /// Runs `work` on all buckets, which must be here, with a word on which parameters hold a gradient.
    pub(crate) fn with_buckets<R>(&self, work: impl FnOnce(&[(&BucketLayout, &[f32])], &[bool]) -> R) -> Result<R> {
        let state = self.lock();
        state.check_complete()?;
        let view = |bucket| match bucket {
            &Bucket {
                ref layout,
                memory: Memory::Here(ref buffer),
                ..
            } => Ok((layout, &buffer.as_slice::<f32>()[..layout.elements])),
            _ => Err(INCOMPLETE),
        };
        let views: Vec<_> = state.buckets.iter().map(view).collect::<Result<_>>()?;
        Ok(work(&views, &state.holds))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn check_complete(&self) -> Result<()> {
        if self.phase == Phase::Failed {
            Err(INCOMPLETE)
        } else {
            Ok(())
        }
    }

    /// Multiplies the gradients held with the factor that clipping left, so that others may be added.
    fn apply_scale(&mut self) -> Result<()> {
        let scale = std::mem::replace(&mut self.scale, 1.0);
        if scale == 1.0 {
            return Ok(());
        }
        for parameter in 0..self.places.len() {
            if self.holds[parameter] {
                let chunks = self.slot_mut(parameter)?.par_chunks_mut(BLOCK);
                chunks.for_each(|chunk| chunk.iter_mut().for_each(|value| *value *= scale));
            }
        }
        Ok(())
    }

    fn add(&mut self, parameter: usize, gradient: &Tensor) -> Result<()> {
        if self.phase != Phase::Running {
            return Err(Error::Order {
                what: "a gradient outside of the engine's backward",
                hint: "call backward of the engine or accelerator instead of loss.backward()",
            });
        }
        let gradient = gradient.contiguous()?;
        let (storage, layout) = gradient.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
            return Err(Error::Candle(candle_core::Error::msg(format!(
                "gradient of a managed parameter is {} on {:?} where f32 on the CPU was expected",
                gradient.dtype().as_str(),
                gradient.device()
            ))));
        };
        let values = &values[layout.start_offset()..][..layout.shape().elem_count()];
        let is_first = !self.holds[parameter];
        let slot = self.slot_mut(parameter)?;
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
                _ => return Err(INCOMPLETE),
            };
            self.left += 1;
        }
        Ok(())
    }
}
