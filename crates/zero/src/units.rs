//! When the parameters of which unit are there: gathered for its forward and its backward, released after each.
//!
//! # Protocol
//!
//! Parameters come and go by shards. A shard is *absent*, *under way* (its gather runs behind the caller) or *present*.
//! It has as many users as units that compute with it; a tied parameter's shard has users from several units.
//!
//! - **Forward.** [`Units::enter_forward`] makes the unit's shards present; [`Units::leave_forward`] gives them up.
//! - **Backward.** The gate on a unit's output calls [`Units::enter_backward`] before anything of the unit is
//!   differentiated. The unit's shards are given up when the gradients of all its trained parameters have come
//!   ([`Units::gradient_came`]): candle delivers a gradient after all nodes that use the parameter, so no node needs one
//!   any more. Frozen parameters have no gradient to wait for; a unit that has sharded ones also waits until the gradients
//!   of its inputs are complete ([`Units::input_done`]), and for the trained parameters of units within it, through which
//!   gradients may pass that no input has part in.
//! - A shard that nobody uses is released, unless the [`Trace`] says that the same unit's backward comes next, as it does
//!   for the last unit.
//! - Whatever is left at the end of a backward ([`Units::end_backward`]), or before values change
//!   ([`Units::release_all`]), is released then.
//!
//! The memory of what is released is [kept](crate::spares) for what is gathered next, up to a limit.
//!
//! While a trace is known, gathers of the units that come next run ahead, within the limits of
//! [`Gathering`](crate::Gathering). Ranks whose models run alike start the same gathers in the same order.

mod recomputing;
mod scopes;

use crate::gradients::Gradients;
use crate::parameter::Home;
use crate::parameters::{Parameters, PartKind};
use crate::recompute::Runs;
use crate::shard::{DiskShares, Shard};
use crate::spares::Spares;
use crate::trace::{Event, Pass, Trace};
use crate::unit::Casts;
use crate::{BackwardPrefetch, DiskOptions, DiskValues, Error, Gathering, Result, Tier};
use candle_core::{DType, Tensor, TensorId};
use sconce_collectives::{Communicator, Pending};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The units of one model on one rank.
#[derive(Debug)]
pub(crate) struct Units {
    communicator: Arc<dyn Communicator>,
    gathering: Gathering,
    disk: Option<DiskOptions>,
    parameters: Arc<Parameters>,
    gradients: Arc<Gradients>,
    /// Trained parameters by their tensors, once all are known.
    numbers: OnceLock<HashMap<TensorId, usize>>,
    runs: Runs,
    /// Whether what goes into units is converted, and to what that which comes out is.
    casts: (bool, Option<DType>),
    state: Mutex<State>,
    /// Set when a loss has been reported that is no number.
    has_warned: AtomicBool,
}

/// One run of a unit whose inputs' gradients are waited for.
#[derive(Debug, Default)]
pub(crate) struct Invocation {
    inputs_to_come: AtomicUsize,
}

impl Invocation {
    pub(crate) fn expect_input(&self) {
        self.inputs_to_come.fetch_add(1, Relaxed);
    }
}

#[derive(Debug, Default)]
struct State {
    /// Set once the model is complete and the shards are shared.
    is_ready: bool,
    units: Vec<Unit>,
    shards: Vec<Presence>,
    /// Units that each parameter's gradient matters to.
    units_of: Vec<Vec<usize>>,
    /// Where shares lie that are not in memory.
    disk: Option<Arc<DiskShares>>,
    trace: Trace,
    live: Live,
    spares: Spares,
    /// The most bytes that were there at once when a unit ran.
    needed_bytes: usize,
    /// Bytes of the largest shard.
    largest_bytes: usize,
}

/// Elements and bytes of parameters that are there, or under way.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Live {
    elements: usize,
    pub(crate) bytes: usize,
    pub(crate) peak_bytes: usize,
    pub(crate) peak_elements: usize,
}

#[derive(Debug, Default)]
struct Unit {
    shards: Vec<usize>,
    /// Trained parameters, those of parts within it too; the last created first, as their gradients mostly come.
    trained: Vec<usize>,
    /// Parameters whose gradients a backward waits for.
    awaited: usize,
    /// Set while the program keeps it present.
    is_held: bool,
    /// Set while its backward is under way.
    backward: Option<Backward>,
}

#[derive(Debug)]
struct Backward {
    gradients_to_come: usize,
    invocations: Vec<Arc<Invocation>>,
}

#[derive(Debug)]
struct Presence {
    shard: Arc<Shard>,
    users: usize,
    state: Whereabouts,
}

/// When gathers are started ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    UnitBegins,
    BackwardEnded,
}

#[derive(Debug)]
enum Whereabouts {
    Absent,
    UnderWay(Pending<Result<()>>),
    Present,
}

impl Units {
    pub(crate) fn new(
        communicator: Arc<dyn Communicator>,
        gathering: Gathering,
        disk: Option<DiskOptions>,
        parameters: Arc<Parameters>,
        gradients: Arc<Gradients>,
        casts: (bool, Option<DType>),
    ) -> Self {
        Self {
            communicator,
            gathering,
            disk,
            parameters,
            gradients,
            numbers: OnceLock::new(),
            runs: Runs::default(),
            casts,
            state: Mutex::default(),
            has_warned: AtomicBool::new(false),
        }
    }

    pub(crate) fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Returns the dtypes at the border of a part.
    pub(crate) fn casts(&self, part: &PartKind) -> Casts {
        if !part.is_unit {
            return Casts::default();
        }
        Casts {
            inputs: part.dtype.filter(|_| self.casts.0),
            outputs: self.casts.1,
        }
    }

    /// Completes the model: no parameter can be added from now on, and peers reach the shards. Called by all ranks.
    pub(crate) fn make_ready(&self) -> Result<()> {
        self.ready().map(drop)
    }

    /// Makes a unit's parameters present for its forward; `None` if none is sharded, so that nothing is to be done.
    pub(crate) fn enter_forward(&self, unit: usize) -> Result<Option<Arc<Invocation>>> {
        if !self.parameters.has_shards() && !self.parameters.may_recompute() {
            return Ok(None);
        }
        let mut state = self.ready()?;
        if state.units[unit].shards.is_empty() {
            return Ok(None);
        }
        state.use_shards(unit);
        self.run(&mut state, unit, Pass::Forward)?;
        Ok(Some(Arc::default()))
    }

    /// Says whether a tensor is a sharded parameter of a unit, or a view of one.
    pub(crate) fn holds(&self, unit: usize, tensor: &Tensor) -> bool {
        let state = self.lock();
        let shards = &state.units[unit].shards;
        shards.iter().any(|shard| state.shards[*shard].shard.holds(tensor))
    }

    /// Gives a unit's parameters up after its forward.
    pub(crate) fn leave_forward(&self, unit: usize) -> Result<()> {
        let mut state = self.lock();
        let pass = Pass::Backward;
        let runs_next = state.trace.ahead().first() == Some(&Event { unit, pass });
        state.give_up(unit, runs_next || !self.gathering.reshard_after_forward)
    }

    /// Says whether a unit waits for the gradients of its inputs before its parameters may go.
    pub(crate) fn awaits_inputs(&self, unit: usize) -> bool {
        let state = self.lock();
        let frozen = |shard: &usize| !state.shards[*shard].shard.is_trained();
        state.units[unit].shards.iter().any(frozen)
    }

    /// Makes a unit's parameters present for its backward, if that has not begun.
    pub(crate) fn enter_backward(&self, unit: usize, invocation: &Arc<Invocation>) -> Result<()> {
        let mut state = self.lock();
        let state = &mut *state;
        if let Some(backward) = &mut state.units[unit].backward {
            backward.invocations.push(Arc::clone(invocation));
            return Ok(());
        }
        state.units[unit].backward = Some(Backward {
            gradients_to_come: state.units[unit].awaited,
            invocations: vec![Arc::clone(invocation)],
        });
        state.use_shards(unit);
        self.run(state, unit, Pass::Backward)
    }

    /// Notes that a parameter's gradient is complete.
    pub(crate) fn gradient_came(&self, parameter: usize) -> Result<()> {
        let mut state = self.lock();
        for position in 0..state.units_of.get(parameter).map_or(0, Vec::len) {
            let unit = state.units_of[parameter][position];
            if let Some(backward) = &mut state.units[unit].backward {
                backward.gradients_to_come = backward.gradients_to_come.saturating_sub(1);
            }
            self.end_backward_if_done(&mut state, unit)?;
        }
        Ok(())
    }

    /// Notes that the gradient of one input of a run is complete.
    pub(crate) fn input_done(&self, unit: usize, invocation: &Invocation) -> Result<()> {
        invocation.inputs_to_come.fetch_sub(1, Relaxed);
        self.end_backward_if_done(&mut self.lock(), unit)
    }

    /// Ends a backward: nothing stays.
    pub(crate) fn end_backward(&self) -> Result<()> {
        let mut state = self.lock();
        state.end_backwards();
        state.trace.end_of_backward();
        state.release_unused()
    }

    /// Releases everything before values change; fails while a unit runs.
    pub(crate) fn release_all(&self) -> Result<()> {
        let mut state = self.lock();
        state.end_backwards();
        state.trace.interrupt();
        if state.shards.iter().any(|presence| presence.users > 0) {
            return Err(Error::Order {
                what: "a change of sharded parameters while a unit computes with them",
                hint: "call step, edit and load outside of the model's forward and of a scope for reading, and after \
                       Unit::reshard",
            });
        }
        state.release_unused()
    }

    /// Says once, if parameters are sharded, what a loss that is no number may come from.
    pub(crate) fn explain_loss(&self, loss: &Tensor) {
        if !self.parameters.has_shards() || self.has_warned.load(Relaxed) {
            return;
        }
        let value = loss.detach().to_dtype(DType::F32).and_then(|loss| loss.sum_all());
        let value = value.and_then(|loss| loss.to_scalar::<f32>());
        if value.is_ok_and(|value| !value.is_finite()) && !self.has_warned.swap(true, Relaxed) {
            tracing::warn!(
                "the loss is not finite; if it is with whole parameters, a sharded parameter is used outside of its \
                 unit's forward, where it is not a number"
            );
        }
    }

    /// Returns the bytes of shares on disk, and of the memory that they and the file's window pass through.
    pub(crate) fn disk_bytes(&self) -> (u64, u64) {
        let state = self.lock();
        let Some(disk) = &state.disk else { return (0, 0) };
        let staging = disk.staging.lock().unwrap_or_else(PoisonError::into_inner).len();
        (disk.file.bytes_on_disk(), disk.file.bytes_in_memory() + staging as u64)
    }

    /// Returns the bytes of memory that is kept for gathers to come.
    pub(crate) fn spare_bytes(&self) -> usize {
        self.lock().spares.bytes()
    }

    /// Returns what is gathered.
    pub(crate) fn live(&self) -> Live {
        self.lock().live
    }

    /// Starts the gathers of a unit that runs now, and of those expected after it, and waits for its own.
    fn run(&self, state: &mut State, unit: usize, pass: Pass) -> Result<()> {
        if state.trace.advance(Event { unit, pass }) {
            state.release_unused()?;
        }
        let shards = state.units[unit].shards.clone();
        shards.iter().try_for_each(|shard| self.start(state, *shard))?;
        self.start_ahead(state, Moment::UnitBegins)?;
        state.needed_bytes = state.needed_bytes.max(state.live.bytes);
        shards.iter().try_for_each(|shard| state.wait(*shard))
    }

    /// Ends a unit's backward if all its gradients have come.
    fn end_backward_if_done(&self, state: &mut State, unit: usize) -> Result<()> {
        if state.end_backward_if_done(unit)? {
            self.start_ahead(state, Moment::BackwardEnded)?;
        }
        Ok(())
    }

    /// Says whether a unit may be gathered now ahead of a pass through it.
    fn goes_ahead(&self, pass: Pass, now: Moment) -> bool {
        match (pass, self.gathering.backward_prefetch) {
            (Pass::Forward, _) => self.gathering.forward_prefetch && now == Moment::UnitBegins,
            (Pass::Backward, BackwardPrefetch::Pre) => now == Moment::UnitBegins,
            (Pass::Backward, BackwardPrefetch::Post) => now == Moment::BackwardEnded,
            (Pass::Backward, BackwardPrefetch::None) => false,
        }
    }

    /// Starts gathers of the units expected next, as far as the limits allow.
    fn start_ahead(&self, state: &mut State, now: Moment) -> Result<()> {
        let (mut ahead, mut units, mut counted) = (0, Vec::new(), Vec::new());
        for position in 0..state.trace.ahead().len() {
            let Event { unit, pass } = state.trace.ahead()[position];
            if !self.goes_ahead(pass, now) {
                return Ok(());
            }
            for shard in state.units[unit].shards.clone() {
                let presence = &state.shards[shard];
                // The unit at hand is not ahead, and what several units use is gathered once.
                if presence.users > 0 || counted.contains(&shard) {
                    continue;
                }
                let elements = presence.shard.gathered_elements();
                if matches!(presence.state, Whereabouts::Present) {
                    continue;
                }
                if !units.contains(&unit) {
                    if units.len() == self.gathering.prefetch_units {
                        return Ok(());
                    }
                    units.push(unit);
                }
                match presence.state {
                    Whereabouts::Present | Whereabouts::UnderWay(_) => {}
                    Whereabouts::Absent => {
                        let live = state.live.elements + elements;
                        if ahead + elements > self.gathering.prefetch_elements
                            || live > self.gathering.max_live_elements
                        {
                            return Ok(());
                        }
                        self.start(state, shard)?;
                    }
                }
                ahead += elements;
                counted.push(shard);
            }
        }
        Ok(())
    }

    fn start(&self, state: &mut State, shard: usize) -> Result<()> {
        if !matches!(state.shards[shard].state, Whereabouts::Absent) {
            return Ok(());
        }
        state.supply(shard)?;
        let presence = &mut state.shards[shard];
        let source = Arc::clone(&presence.shard);
        let gather = move |outcome: &mut Result<()>, group: &dyn Communicator| {
            let _span = tracing::debug_span!("gather", what = source.unit(), bytes = source.gathered_bytes()).entered();
            *outcome = source.gather(group);
            Ok(())
        };
        presence.state = Whereabouts::UnderWay(self.communicator.run_behind(Ok(()), gather));
        Ok(())
    }

    /// Returns the state after making sure that the model is complete, its shards can be reached and its units are known.
    fn ready(&self) -> Result<MutexGuard<'_, State>> {
        let mut state = self.lock();
        if !state.is_ready {
            self.parameters.seal()?;
            let (_, shards) = self.parameters.units();
            state.disk = self.place(&shards)?;
            let absent = |shard| Presence {
                shard,
                users: 0,
                state: Whereabouts::Absent,
            };
            state.largest_bytes = shards.iter().map(|shard| shard.gathered_bytes()).max().unwrap_or(0);
            state.shards = shards.into_iter().map(absent).collect();
            state.is_ready = true;
        }
        // Units may still be built from the parameters there are.
        if state.units.len() < self.parameters.unit_count() {
            self.parameters.seal()?;
            state.add_units(&self.parameters);
        }
        Ok(state)
    }

    /// Puts this rank's shares where they stay: in memory that peers reach, or on disk.
    fn place(&self, shards: &[Arc<Shard>]) -> Result<Option<Arc<DiskShares>>> {
        let is_on_disk = |shard: &&Arc<Shard>| shard.layout.placement.parameter_tier == Tier::Disk;
        let (on_disk, in_memory): (Vec<_>, Vec<_>) = shards.iter().partition(is_on_disk);
        if self.communicator.size() > 1 {
            in_memory
                .iter()
                .try_for_each(|shard| shard.share(&*self.communicator))?;
        }
        let bytes = on_disk.iter().map(|shard| shard.bytes_of_values());
        let (Some(options), Some(largest)) = (&self.disk, bytes.clone().max()) else {
            return Ok(None);
        };
        let disk = Arc::new(DiskShares {
            file: DiskValues::create(options, self.communicator.rank(), bytes.sum::<usize>() as u64)?,
            staging: Mutex::new(self.communicator.allocate(largest)?),
        });
        let mut offset = 0;
        for shard in on_disk {
            shard.move_to_disk(&disk, offset)?;
            offset += shard.bytes_of_values() as u64;
        }
        Ok(Some(disk))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes the units in that have been built since the last call.
    fn add_units(&mut self, parameters: &Parameters) {
        let all = parameters.all();
        let (units, _) = parameters.units();
        self.units_of.resize(all.len(), Vec::new());
        for number in self.units.len()..units.len() {
            let gathered = units[number].parameters.iter().filter(|_| units[number].kind.is_unit);
            let shards = self.shards_of(gathered.map(|number| &all[*number].home));
            let is_frozen = |shard: &usize| !self.shards[*shard].shard.is_trained();
            let lies_within = |unit: &usize| {
                std::iter::successors(units[*unit].outer, |unit| units[*unit].outer).any(|outer| outer == number)
            };
            let inner = (number + 1..units.len()).filter(lies_within);
            let own = &units[number].parameters;
            let mut trained: Vec<_> = own
                .iter()
                .chain(inner.flat_map(|unit| &units[unit].parameters))
                .copied()
                .collect();
            trained.retain(|parameter| all[*parameter].is_trained);
            trained.sort_unstable_by(|a, b| b.cmp(a));
            trained.dedup();
            let mut awaited = trained.clone();
            if !shards.iter().any(is_frozen) {
                awaited.retain(|parameter| own.contains(parameter));
            }
            awaited
                .iter()
                .for_each(|parameter| self.units_of[*parameter].push(number));
            self.units.push(Unit {
                shards,
                trained,
                awaited: awaited.len(),
                is_held: false,
                backward: None,
            });
        }
    }

    /// Returns the numbers of the shards in which parameters live.
    fn shards_of<'a>(&self, homes: impl Iterator<Item = &'a Home>) -> Vec<usize> {
        let mut numbers = Vec::new();
        for home in homes {
            if let Home::Shard { shard, .. } = home {
                let is_it = |presence: &Presence| Arc::ptr_eq(&presence.shard, shard);
                let number = self.shards.iter().position(is_it);
                numbers.extend(number.filter(|number| !numbers.contains(number)));
            }
        }
        numbers
    }

    fn use_shards(&mut self, unit: usize) {
        for shard in &self.units[unit].shards {
            self.shards[*shard].users += 1;
        }
    }

    /// Gives up a unit's use of its shards; releases those that nobody uses, unless they are to be kept.
    fn give_up(&mut self, unit: usize, keep: bool) -> Result<()> {
        for position in 0..self.units[unit].shards.len() {
            let shard = self.units[unit].shards[position];
            self.shards[shard].users -= 1;
            if self.shards[shard].users == 0 && !keep {
                self.release(shard)?;
            }
        }
        Ok(())
    }

    /// Gives a unit's shards up if its backward is done; says whether that is so.
    fn end_backward_if_done(&mut self, unit: usize) -> Result<bool> {
        let is_done = |backward: &mut Backward| {
            let inputs = |run: &Arc<Invocation>| run.inputs_to_come.load(Relaxed) == 0;
            backward.gradients_to_come == 0 && backward.invocations.iter().all(inputs)
        };
        match self.units[unit].backward.take_if(is_done) {
            Some(_) => self.give_up(unit, false).map(|()| true),
            None => Ok(false),
        }
    }

    /// Gives up the shards of all units whose backward is under way.
    fn end_backwards(&mut self) {
        for unit in &mut self.units {
            if unit.backward.take().is_some() {
                unit.shards.iter().for_each(|shard| self.shards[*shard].users -= 1);
            }
        }
    }

    fn release_unused(&mut self) -> Result<()> {
        let unused = (0..self.shards.len()).filter(|shard| self.shards[*shard].users == 0);
        let unused: Vec<_> = unused.collect();
        unused.into_iter().try_for_each(|shard| self.release(shard))
    }

    fn release(&mut self, shard: usize) -> Result<()> {
        self.wait(shard)?;
        let presence = &mut self.shards[shard];
        if matches!(presence.state, Whereabouts::Present) {
            presence.state = Whereabouts::Absent;
            self.live.elements -= presence.shard.gathered_elements();
            self.live.bytes -= presence.shard.gathered_bytes();
            presence
                .shard
                .tensors()
                .iter()
                .try_for_each(|tensor| self.spares.take(tensor))?;
        }
        Ok(())
    }

    /// Counts a shard that is gathered next, and gives its tensors memory that is spare.
    ///
    /// What is live and what is spare are together at most what units need at once, and the largest unit more: enough for
    /// units of one size to need no memory from the system, with one among them of another.
    fn supply(&mut self, shard: usize) -> Result<()> {
        let shard = Arc::clone(&self.shards[shard].shard);
        let live = &mut self.live;
        live.elements += shard.gathered_elements();
        live.bytes += shard.gathered_bytes();
        live.peak_elements = live.peak_elements.max(live.elements);
        live.peak_bytes = live.peak_bytes.max(live.bytes);
        shard
            .tensors()
            .iter()
            .try_for_each(|tensor| self.spares.supply(tensor))?;
        let most = self.needed_bytes + self.largest_bytes;
        self.spares.limit(most.saturating_sub(self.live.bytes))
    }

    fn wait(&mut self, shard: usize) -> Result<()> {
        let presence = &mut self.shards[shard];
        if let Whereabouts::UnderWay(_) = presence.state {
            let state = std::mem::replace(&mut presence.state, Whereabouts::Present);
            if let Whereabouts::UnderWay(pending) = state {
                let _span = tracing::debug_span!("wait for gather", what = presence.shard.unit()).entered();
                let outcome = pending.wait().map_err(Error::from).flatten();
                outcome.map_err(|error| self.with_names(error))?;
            }
        }
        Ok(())
    }

    /// Writes units' names for the labels of their gathers.
    fn with_names(&self, error: Error) -> Error {
        let Error::Collectives(source @ sconce_collectives::Error::Mismatch { .. }) = error else {
            return error;
        };
        let mut calls = source.to_string();
        for Presence { shard, .. } in &self.shards {
            let label = format!("with {}", shard.written_label());
            let unit = format!("for unit {:?}", shard.unit());
            // Gathers through memory on a GPU are of another kind, whose labels are written as counts.
            let as_counts = label.replace("label", "counts");
            calls = calls.replace(&label, &unit).replace(&as_counts, &unit);
        }
        Error::UnitOrder { calls, source }
    }
}
