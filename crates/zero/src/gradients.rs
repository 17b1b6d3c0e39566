//! Gradients on their way: from the hooks into buckets, and from full buckets to the other ranks.
//!
//! # Protocol
//!
//! A bucket's memory is *absent* (a sharded gradient that has not begun to come in), *here* (this rank fills it) or
//! *away* (its reduction runs behind the backward pass). Within one backward a bucket leaves when all its parameters have
//! come in **and** all buckets before it have left: so every rank starts the same reductions in the same order, whatever
//! order gradients arrive in. [`Gradients::finish`] sends the rest off and waits for all to come back.
//!
//! What a reduction does follows from the placement:
//!
//! | gradient | optimizer state | reduced | into |
//! | --- | --- | --- | --- |
//! | replicated | replicated | when the backward synchronises, all-reduce | all parts of the bucket |
//! | replicated | sharded | when the backward synchronises, reduce-scatter | this rank's part of the bucket |
//! | sharded | sharded | in every backward, reduce-scatter | this rank's part, added to its shard |
//!
//! Where ranks shard in several groups, each reduce-scatter runs in one group, and at the end of a backward that
//! synchronises the parts held are all-reduced over the groups.
//!
//! Replicated gradients have a bucket each that lasts; sharded ones pass through a few buffers that all share.
//!
//! All gradients held bear one loss scale, that of the backward which came first since they were last forgotten; it
//! stays in them and is divided out where they are used.
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
//! | synchronised | reduced over all ranks, which agree on the parameters that hold one | running, empty |
//! | failed | incomplete or lost; nothing may be read | none |
//!
//! # From a device
//!
//! A gradient on a GPU is copied beside what the backward computes meanwhile, and is in the bucket's memory when the bucket
//! leaves at the latest, in the order in which gradients came. Waiting for it is the first part of the bucket's reduction.
//! For the GPU to be ahead, a bucket then leaves only when the one after it is full, too, or at the end. Copies under way
//! are at most some 64 MiB, and what two buckets have that are away.

mod arrival;
mod change;
mod departure;
mod exchange;
mod measures;
mod power_sgd;
mod reduction;
mod window;

pub(crate) use arrival::Arrival;
use change::Change;
pub(crate) use exchange::bytes_of;
pub(crate) use power_sgd::Compression;
pub use power_sgd::PowerSgd;
use reduction::Reduction;

use crate::anomaly::AnomalyWatch;
use crate::bucket::{Bucket, Held, Memory};
use crate::device::Staging;
use crate::layout::BucketLayout;
use crate::mesh::Mesh;
use crate::overflow::Finiteness;
use crate::storage::{Elements, is_managed_dtype};
use crate::weighted_mean::WeightedMean;
use crate::{Error, ParameterInfo, Residence, Result};
use candle_core::{CpuStorage, DType, Storage, Tensor};
use sconce_collectives::{Buffer, Communicator, ReduceOp};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Buffers through which sharded gradients pass: one fills while two are being reduced.
pub(crate) const PASSING_BUFFERS: usize = 3;
/// Buckets with gradients from a device that may be away at once.
const AWAY_FROM_A_DEVICE: usize = 2;

const INCOMPLETE: Error = Error::Order {
    what: "gradients are incomplete",
    hint: "the last backward failed; correct its cause and start over with a new engine",
};

const CAME_TWICE: Error = Error::Order {
    what: "a gradient for a bucket that is being reduced",
    hint: "a parameter's gradient came twice in one backward; call backward once per graph",
};

/// The gradient buckets of one model on one rank.
#[derive(Debug, Default)]
pub(crate) struct Gradients {
    staging: Arc<Staging>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What gradients on a device pass through.
    staging: Arc<Staging>,
    /// Set once the layout is known, before the first backward.
    mesh: Option<Arc<Mesh>>,
    reduce_dtype: Option<DType>,
    buckets: Vec<Bucket>,
    /// The parameters in the order that the layout follows.
    order: Vec<usize>,
    parameters: Vec<Arc<ParameterInfo>>,
    /// Where gradients that are not finite are looked for.
    watch: Option<AnomalyWatch>,
    /// Bucket and slot of every parameter.
    places: Vec<(usize, usize)>,
    /// Buffers for sharded gradients that are free.
    passing: Vec<Buffer>,
    /// How many of them there are, their size in bytes, and whether peers reach them in place.
    pool: (usize, usize, bool),
    /// Whether they lie on the GPU.
    passes_on_gpu: bool,
    phase: Phase,
    /// What the gradients held are to be multiplied with, from clipping.
    scale: f32,
    /// What the losses were multiplied with that the gradients held come from.
    loss_scale: f64,
    finiteness: Finiteness,
    /// What the gradients held weigh, where their losses were given weights.
    mean: Option<WeightedMean>,
    /// Buckets that have left in this backward.
    left: usize,
    /// Whether gradients come from a device.
    is_from_device: bool,
    synchronise: bool,
    /// Whether a step takes gradients that are this rank's own.
    steps_locally: bool,
    /// Gradients that came in during this backward, by parameter.
    arrived: Vec<bool>,
    /// How many gradients are still to come in, by parameter: one, but for parts that are computed again.
    to_come: Vec<u32>,
    /// Whether a gradient is held since the last clear, by parameter.
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

impl Gradients {
    pub(crate) fn new(staging: Arc<Staging>) -> Self {
        let state = State {
            staging: Arc::clone(&staging),
            ..State::default()
        };
        Self {
            staging,
            state: Mutex::new(state),
        }
    }

    /// Says whether the buckets have been laid out.
    pub(crate) fn is_laid_out(&self) -> bool {
        self.lock().mesh.is_some()
    }

    /// Allocates the buckets of these parameters; called by all ranks with one layout.
    pub(crate) fn lay_out(
        &self,
        mesh: &Arc<Mesh>,
        (order, layouts): (Vec<usize>, Vec<BucketLayout>),
        parameters: Vec<Arc<ParameterInfo>>,
        (reduce_dtype, compression): (DType, Option<&PowerSgd>),
    ) -> Result<()> {
        let mut state = self.lock();
        state.reduce_dtype = Some(reduce_dtype);
        state.order = order;
        state.places = vec![(0, 0); parameters.len()];
        let sharded = || {
            let layouts = layouts.iter();
            layouts.filter(|layout| layout.placement.gradient == Residence::Sharded)
        };
        let passing = sharded().map(BucketLayout::elements);
        let (largest, buffers) = (passing.clone().max().unwrap_or(0), passing.count().min(PASSING_BUFFERS));
        let staging = Arc::clone(&state.staging);
        let gpu_of = |layout: &BucketLayout| staging.gpu(layout.placement.optimizer_state_tier);
        // All share them, so that all must be on the GPU for these to be.
        let gpu = sharded().map(gpu_of).reduce(Option::and).flatten();
        state.passes_on_gpu = gpu.is_some();
        for _ in 0..buffers {
            state.passing.push(match gpu {
                Some(gpu) => gpu.allocate(largest * size_of::<f32>())?,
                None => mesh.shard.allocate_elements::<f32>(largest)?,
            });
        }
        state.pool = state
            .passing
            .first()
            .map_or((0, 0, false), |first| (buffers, first.len(), first.is_shared()));
        for (number, layout) in layouts.into_iter().enumerate() {
            for (slot, place) in layout.slots.iter().enumerate() {
                state.places[place.parameter] = (number, slot);
            }
            let group = match layout.placement.optimizer_state {
                Residence::Replicated => &mesh.world,
                Residence::Sharded => &mesh.shard,
            };
            let gpu = gpu_of(&layout);
            let allocate = |elements| match gpu {
                Some(gpu) => gpu.allocate(elements * size_of::<f32>()),
                None => Ok(group.allocate_elements::<f32>(elements)?),
            };
            let mut bucket = Bucket::new(layout, gpu, allocate)?;
            if let Some(settings) = compression {
                if bucket.is_stepped_by_parts() {
                    return Err(Error::Setting {
                        setting: "power_sgd",
                        value: format!("{settings:?}"),
                        expected: "data parallelism: sharded gradients and states are not compressed",
                    });
                }
                let state = Compression::new(settings, &bucket.layout, &parameters);
                bucket.compression = Some(Arc::new(Mutex::new(state)));
            }
            state.buckets.push(bucket);
        }
        state.holds = vec![false; parameters.len()];
        state.parameters = parameters;
        (state.scale, state.loss_scale) = (1.0, 1.0);
        state.mesh = Some(Arc::clone(mesh));
        Ok(())
    }

    /// Prepares for a backward pass; gradients held from earlier ones are scaled as clipping asked.
    ///
    /// `to_come` says how many gradients each parameter gets, if that is not one. Returns the factor for the loss:
    /// `loss_scale`, or the one that gradients held from earlier passes bear.
    pub(crate) fn begin(&self, synchronise: bool, loss_scale: f64, to_come: Option<Vec<u32>>) -> Result<f64> {
        let mut state = self.lock();
        let state = &mut *state;
        state.check_complete()?;
        if state.phase == Phase::Empty {
            state.loss_scale = loss_scale;
            state.finiteness = Finiteness::default();
        }
        state.finiteness.gradients_come();
        state.apply_scale()?;
        state.phase = Phase::Running;
        state.synchronise = synchronise;
        state.left = 0;
        state.arrived = vec![false; state.places.len()];
        state.to_come = to_come.unwrap_or_else(|| vec![1; state.places.len()]);
        state.failure = None;
        state.watch.iter_mut().for_each(AnomalyWatch::begin);
        for bucket in &mut state.buckets {
            bucket.missing = bucket.layout.slots.len();
        }
        Ok(state.loss_scale)
    }

    /// Takes a gradient of a parameter in this backward, and says whether it was the last to come; called by the
    /// parameter's hook.
    pub(crate) fn accept(&self, parameter: usize, gradient: &Tensor) -> candle_core::Result<bool> {
        let mut state = self.lock();
        let state = &mut *state;
        let added = state.add(parameter, gradient);
        let outcome = added.map(|()| state.expect(parameter, -1));
        state.then_send(outcome)
    }

    /// Corrects how many gradients of parameters are still to come in; returns the parameters whose gradients are complete
    /// by that.
    pub(crate) fn correct(&self, changes: &[(usize, i64)]) -> candle_core::Result<Vec<usize>> {
        let mut state = self.lock();
        let state = &mut *state;
        let mut complete = Vec::new();
        for (parameter, change) in changes {
            complete.extend(state.expect(*parameter, *change).then_some(*parameter));
        }
        state.then_send(Ok(complete))
    }

    /// Gives up the backward under way; what is held is incomplete from now on.
    pub(crate) fn fail(&self) {
        let mut state = self.lock();
        state.phase = Phase::Failed;
        state.buckets.iter_mut().for_each(|bucket| bucket.arrivals.clear());
    }

    /// Returns the numbers of the parameters whose gradient did not come in during this backward.
    pub(crate) fn missing(&self) -> Vec<usize> {
        let state = self.lock();
        let numbered = state.arrived.iter().enumerate();
        numbered
            .filter(|(_, arrived)| !**arrived)
            .map(|(number, _)| number)
            .collect()
    }

    /// Ends a backward: reduces what is to be reduced in it and has not been, and waits for everything.
    ///
    /// With `may_be_unused` ranks also agree, if it synchronises, on which parameters hold a gradient: those that any
    /// rank used.
    pub(crate) fn finish(&self, may_be_unused: bool) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        for number in 0..state.buckets.len() {
            if state.is_reduced_now(number) {
                state.zero_what_is_missing(number)?;
                state.buckets[number].missing = 0;
            }
        }
        state.send_full_buckets(true)?;
        state.buckets.iter_mut().try_for_each(Bucket::land)?;
        (0..state.buckets.len()).try_for_each(|number| state.bring_back(number))?;
        if !state.synchronise {
            state.phase = Phase::Local;
            return Ok(());
        }
        state.join_replicas()?;
        if let Some(mesh) = state.mesh.clone().filter(|_| may_be_unused) {
            let mut held: Vec<u8> = state.holds.iter().map(|held| u8::from(*held)).collect();
            mesh.world.all_reduce(&mut held, ReduceOp::Max)?;
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
        self.lock().forget();
    }

    /// Fails unless gradients are held that have been reduced over all ranks.
    pub(crate) fn check_synchronised(&self) -> Result<()> {
        let state = self.lock();
        state.check_complete()?;
        let hint = match state.phase {
            Phase::Synchronised => return Ok(()),
            Phase::Local if state.steps_locally => return Ok(()),
            Phase::Local => {
                "the last backward kept its gradients on this rank; the last one before a step must synchronise"
            }
            _ => "there are no gradients; call backward first, and zero_grad only after the step",
        };
        Err(Error::Order { what: "step", hint })
    }

    /// Lets steps take gradients that are this rank's own, or not any more.
    pub(crate) fn step_locally(&self, on: bool) {
        self.lock().steps_locally = on;
    }

    /// Scales all gradients held; takes effect where they are used.
    pub(crate) fn scale_by(&self, factor: f32) {
        self.lock().scale *= factor;
    }

    /// Returns the bytes of gradients that last, and of buffers through which others pass.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let state = self.lock();
        let elements = |bucket: &Bucket| {
            if bucket.is_sharded() {
                bucket.shard.len()
            } else {
                bucket.layout.elements()
            }
        };
        let lasting: usize = state.buckets.iter().map(elements).sum();
        let passing: usize = state.passing.iter().map(Buffer::len).sum();
        let kept = state.compressions().map(|compression| compression.bytes());
        (
            (lasting * size_of::<f32>()) as u64,
            (passing + kept.sum::<usize>()) as u64,
        )
    }

    /// Returns the factor by which the gradients that [`Gradients::with_held`] shows are still to be multiplied: what
    /// clipping asked for, over the loss scale.
    pub(crate) fn scale(&self) -> f32 {
        let state = self.lock();
        (f64::from(state.scale) / state.loss_scale) as f32
    }

    /// Limits every element of the gradients held to `-limit..=limit`; what is not a number stays so.
    pub(crate) fn clamp(&self, limit: f32) -> Result<()> {
        let mut state = self.lock();
        state.check_complete()?;
        state.apply_scale()?;
        let limit = (f64::from(limit) * state.loss_scale) as f32;
        let finite = state.change_held(Change::Clamp(limit))?;
        state.finiteness.clamped(finite);
        Ok(())
    }

    /// Runs `work` on the parts of all buckets that this rank holds, with a word on which parameters hold a gradient.
    pub(crate) fn with_held<R>(&self, work: impl FnOnce(&[Held<'_>], &[bool]) -> R) -> Result<R> {
        let state = self.lock();
        state.check_complete()?;
        let rank = state.rank();
        let is_local = state.phase != Phase::Synchronised;
        let views: Vec<_> = state
            .buckets
            .iter()
            .map(|bucket| bucket.held(rank, is_local).ok_or(INCOMPLETE))
            .collect::<Result<_>>()?;
        Ok(work(&views, &state.holds))
    }

    /// Runs `work` on the buckets as they are when gradients have been reduced: for how they are laid out.
    pub(crate) fn with_layout<R>(&self, work: impl FnOnce(&[Held<'_>]) -> R) -> Result<R> {
        let state = self.lock();
        let held = |bucket| Bucket::held(bucket, state.rank(), false).ok_or(INCOMPLETE);
        let views = state.buckets.iter().map(held).collect::<Result<Vec<_>>>()?;
        Ok(work(&views))
    }

    /// Returns the order of parameters by which the buckets were laid out; empty before that.
    pub(crate) fn order(&self) -> Vec<usize> {
        self.lock().order.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn forget(&mut self) {
        self.holds.fill(false);
        self.buckets.iter_mut().for_each(|bucket| bucket.shard_holds = false);
        self.scale = 1.0;
        self.finiteness = Finiteness::default();
        self.mean = None;
        if self.phase != Phase::Failed {
            self.phase = Phase::Empty;
        }
    }

    fn check_complete(&self) -> Result<()> {
        if self.phase == Phase::Failed {
            Err(INCOMPLETE)
        } else {
            Ok(())
        }
    }

    /// Says whether a bucket's gradients are reduced in the backward under way.
    fn is_reduced_now(&self, bucket: usize) -> bool {
        self.synchronise || self.buckets[bucket].is_sharded()
    }

    /// Multiplies the gradients held with the factor that clipping left, so that others may be added.
    fn apply_scale(&mut self) -> Result<()> {
        let scale = std::mem::replace(&mut self.scale, 1.0);
        if scale == 1.0 {
            return Ok(());
        }
        self.change_held(Change::Scale(scale)).map(drop)
    }

    fn add(&mut self, parameter: usize, gradient: &Tensor) -> Result<()> {
        if self.phase != Phase::Running {
            return Err(Error::Order {
                what: "a gradient outside of the engine's backward",
                hint: "call accelerator.backward(&loss) (or Engine::backward) instead of loss.backward()",
            });
        }
        if self.staging.serves(gradient.device()) && self.watch.is_none() {
            // In its own dtype: the copy is what takes time.
            let gradient = if is_managed_dtype(gradient.dtype()) {
                gradient.contiguous()?
            } else {
                gradient.to_dtype(DType::F32)?.contiguous()?
            };
            return self.take_from_device(parameter, &gradient);
        }
        // Where gradients are looked at, those on a device come at once.
        let gradient = gradient.to_device(&candle_core::Device::Cpu)?;
        let gradient = gradient.to_dtype(DType::F32)?.contiguous()?;
        let (storage, layout) = gradient.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
            return Err(Error::Candle(candle_core::Error::msg(format!(
                "gradient of a managed parameter is {} on {:?} where f32 on the CPU was expected",
                gradient.dtype().as_str(),
                gradient.device()
            ))));
        };
        let values = &values[layout.start_offset()..][..layout.shape().elem_count()];
        self.put(parameter, values)
    }

    /// Sees to it that a gradient's bucket has memory, and says whether there is nothing yet to add the gradient to.
    fn make_room(&mut self, parameter: usize) -> Result<bool> {
        let number = self.places[parameter].0;
        // A buffer that is passed on holds this backward's gradients only.
        if self.buckets[number].is_sharded() {
            self.make_present(number)?;
            return Ok(!self.arrived[parameter]);
        }
        Ok(!self.holds[parameter])
    }

    /// Puts a parameter's gradient into its place, or adds it to what is there.
    fn put(&mut self, parameter: usize, values: &[f32]) -> Result<()> {
        self.look_at(parameter, values)?;
        let is_first = self.make_room(parameter)?;
        let (number, slot) = self.places[parameter];
        let Bucket { layout, memory, .. } = &mut self.buckets[number];
        let Memory::Here(buffer) = memory else {
            return Err(CAME_TWICE);
        };
        let places = layout.places(&layout.slots[slot]);
        arrival::put(Elements::F32(values), places, buffer.as_mut_slice(), is_first);
        self.holds[parameter] = true;
        self.arrived[parameter] = true;
        Ok(())
    }

    /// Changes how many gradients of a parameter are still to come in; says whether it is complete by that.
    fn expect(&mut self, parameter: usize, change: i64) -> bool {
        let before = i64::from(self.to_come[parameter]);
        let after = (before + change).max(0);
        self.to_come[parameter] = after as u32;
        // What never comes is dealt with at the end.
        let is_complete = before > 0 && after == 0 && self.arrived[parameter];
        if is_complete {
            self.buckets[self.places[parameter].0].missing -= 1;
        }
        is_complete
    }

    /// Starts what can be reduced after a change, unless that failed; keeps the error for the engine.
    fn then_send<T>(&mut self, outcome: Result<T>) -> candle_core::Result<T> {
        let outcome = outcome.and_then(|value| self.send_full_buckets(false).map(|()| value));
        outcome.map_err(|error| {
            let message = candle_core::Error::msg(&error);
            self.failure = Some(error);
            message
        })
    }

    /// Returns this rank's number among those that shard together.
    fn rank(&self) -> usize {
        self.mesh.as_ref().map_or(0, |mesh| mesh.shard.rank())
    }

    /// Returns the ranks that shard together, once the layout is known.
    fn shard_group(&self) -> Option<Arc<dyn Communicator>> {
        self.mesh.as_ref().map(|mesh| Arc::clone(&mesh.shard))
    }
}
