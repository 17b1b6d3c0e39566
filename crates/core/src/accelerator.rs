//! The contract of an accelerator, and what every accelerator offers on top of it.

use crate::accumulation::Accumulation;
use crate::checkpoint::{Background, Registry};
use crate::data::{DataLoader, PreparedLoader, Source};
use crate::deepspeed::{AutoValues, OptimizerSource, ScheduleSource};
use crate::fp8::Fp8Scaling;
use crate::schedule::Scheduler;
use crate::trackers::Trackers;
use crate::{Error, Nested, Optimizer, Result, RunSettings};
use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use sconce_collectives::{Communicator, ReduceOp, Traffic, World};
use sconce_zero::{Autocast, CandleOptimizer, Engine, LocalTensor, MemoryReport, OptimizerRule, ParameterSet, Weights};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::Write as _;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

/// One rank's entry to distributed training of one model.
///
/// All ranks call the same methods in the same order. The trait is object-safe; [`accelerator`](crate::accelerator)
/// returns a box of the implementation that the configuration asks for.
pub trait Accelerator: Send + Sync + std::fmt::Debug {
    /// Returns this process's place among the ranks.
    fn world(&self) -> &World;

    /// Returns the group of all ranks.
    fn communicator(&self) -> &Arc<dyn Communicator>;

    /// Returns the device on which this rank computes.
    fn device(&self) -> &Device;

    /// Returns the seed from which this accelerator's shuffling and this rank's [`RandomState`](crate::RandomState) derive.
    fn seed(&self) -> u64;

    /// Sets the seed, the same on all ranks; loaders prepared afterwards shuffle by it, and the
    /// [`RandomState`](crate::RandomState) of the calling thread begins anew from it and the rank, as when the accelerator
    /// was built.
    fn set_seed(&self, seed: u64);

    /// Returns what this run is: its precision, where state lives, and what else was set.
    fn settings(&self) -> &RunSettings;

    /// Returns the state of gradient accumulation.
    fn accumulation(&self) -> &Arc<Accumulation>;

    /// Returns what checkpoints of this loop keep.
    fn registry(&self) -> &Arc<Registry>;

    /// Returns the save that is under way behind the training.
    fn background(&self) -> &Background;

    /// Returns where [`log`](trait.Accelerator.html#method.log) sends numbers to; shared by all models of a loop.
    fn trackers(&self) -> &Mutex<Trackers>;

    /// Returns the scales of layers that compute in fp8, where that is the run's precision.
    fn fp8(&self) -> Option<&Arc<Fp8Scaling>>;

    /// Takes note that something is computed within [`autocast`](trait.Accelerator.html#method.autocast).
    #[doc(hidden)]
    fn note_autocast(&self);

    /// Returns this rank's flag of [`set_trigger`](trait.Accelerator.html#method.set_trigger).
    fn trigger(&self) -> &AtomicBool;

    /// Returns an accelerator for another model that is trained in the same loop, as a GAN's discriminator beside its
    /// generator; called by all ranks.
    ///
    /// It has parameters, gradients, an optimizer and a loss scale of its own. Ranks, device, seed, settings and the place in
    /// the accumulation window are those of this one, so `accumulate` is called once for all models, and a loader may be
    /// prepared by either. `backward` trains the model whose accelerator it is called of: a loss may pass through others'
    /// parameters, which get no gradients from it. Models that one loss trains together belong to one accelerator, with
    /// [`ParameterGroups`](crate::ParameterGroups) for different settings. Parameters in `frozen` are not trained.
    ///
    /// # Errors
    /// Failures of the group.
    fn for_another_model(&self, frozen: ParameterSet) -> Result<Box<dyn Accelerator>>;

    /// Returns a `VarBuilder` whose tensors are managed parameters, in the type of the run's precision
    /// ([`RunSettings::parameter_dtype`]) on this rank's device.
    ///
    /// # Errors
    /// When the source cannot be used.
    fn var_builder(&self, weights: Weights) -> Result<VarBuilder<'static>>;

    /// Binds an update rule to the parameters of the model, which has been built.
    ///
    /// # Errors
    /// Bad settings, no model, or different models on different ranks.
    fn prepare_optimizer(&self, rule: Box<dyn OptimizerRule>) -> Result<Optimizer>;

    /// Binds an optimizer of candle's kind, which steps this rank's shares as variables; its own learning rate is that
    /// which schedules scale.
    ///
    /// # Errors
    /// As [`Accelerator::prepare_optimizer`], and the optimizer's own.
    fn prepare_candle_optimizer(&self, optimizer: CandleOptimizer) -> Result<Optimizer>;

    /// Back-propagates a loss of one element, divided by the number of accumulation steps.
    ///
    /// At the end of an accumulation window the gradients become the mean over all ranks (their sum, where a DeepSpeed
    /// configuration has `gradient_allreduce_op` so).
    ///
    /// # Errors
    /// A loss that is not one number, parameters that get no gradient, failures of candle and of the group.
    fn backward(&self, loss: &Tensor) -> Result<()>;

    /// Back-propagates the mean loss of `weight` tokens (or samples), such that an accumulation window comes to the gradient
    /// of the mean over all its tokens, on all ranks.
    ///
    /// [`Accelerator::backward`] averages the micro-batches' means: where they differ in how many tokens count, tokens of
    /// small ones weigh more; and the short window at a loader's end is divided by the full number of micro-batches, as in
    /// Accelerate. This does neither. A weight of 0 contributes nothing. Ranks tell each other their weights, so all of them
    /// call it equally often; a window has weights in all its micro-batches or in none.
    ///
    /// # Errors
    /// As [`Accelerator::backward`]; a weight below 0; a DeepSpeed configuration whose `gradient_allreduce_op` is a sum.
    fn backward_weighted(&self, loss: &Tensor, weight: f64) -> Result<()>;

    /// Scales gradients so that their global L2 norm is at most `max_norm`; returns the norm before, or `None` inside
    /// an accumulation window, where there is nothing to clip yet. Norms are those of the loss as it is, also where it is
    /// scaled; an infinite norm or one that is not a number tells of an overflow, after which the step is skipped.
    ///
    /// # Errors
    /// `max_norm` not above 0, or another than was decided for the run ([`Clipping`](crate::Clipping)), or the last
    /// backward failed.
    fn clip_grad_norm(&self, max_norm: f64) -> Result<Option<f64>>;

    /// Returns what manages the parameters: for reading and editing them while they are whole ([`Engine::read`],
    /// [`Engine::edit`]), other norms, clipping by value.
    fn engine(&self) -> &Arc<Engine>;

    /// Returns what a user should be told, each in one line: settings that do nothing here, and, once the model is prepared,
    /// what is asked for and not done with it. They are also logged through `tracing`, on rank 0.
    fn notices(&self) -> Vec<String> {
        let mut notices = self.settings().notices(self.device());
        notices.extend(self.engine().notices());
        notices
    }

    /// Returns what this rank has moved in all groups of ranks that training uses, by kind of operation.
    fn traffic(&self) -> Vec<Traffic>;

    /// Returns how many bytes of training state this rank holds.
    fn memory(&self) -> MemoryReport;

    /// Returns what this rank holds of the model's parameters; asks nobody. FSDP's `LOCAL_STATE_DICT`, and a rank's part of
    /// `SHARDED_STATE_DICT`.
    ///
    /// # Errors
    /// Failures of candle, and of the disk for shares that lie there.
    fn local_state_dict(&self) -> Result<Vec<LocalTensor>>;

    /// Returns the model's parameters by name, with their current values, on rank 0, and nothing on the others; called by
    /// all ranks, because sharded parameters are gathered for it.
    ///
    /// # Errors
    /// Failures of the group.
    fn state_dict(&self) -> Result<Vec<(String, Tensor)>>;
}

/// What every accelerator offers.
///
/// Tensor methods are collectives: all ranks call them.
impl<'a> dyn Accelerator + 'a {
    /// Prepares optimizer, data and schedule for this world.
    ///
    /// `rule` is an [`OptimizerRule`] or a [`ConfiguredOptimizer`](crate::deepspeed::ConfiguredOptimizer), `schedule` a
    /// [`Schedule`](crate::Schedule) or a [`ConfiguredSchedule`](crate::deepspeed::ConfiguredSchedule).
    ///
    /// # Errors
    /// As [`Accelerator::prepare_optimizer`]; [`Error::Loader`] when the data cannot serve this world;
    /// [`Error::DeepSpeed`] when the loader's batch size is not that of the configuration, values are still `"auto"`, or
    /// optimizer and schedule are given twice or not at all.
    pub fn prepare<D: Source, S: ScheduleSource>(
        &self,
        rule: impl OptimizerSource,
        loader: DataLoader<D>,
        schedule: S,
    ) -> Result<(Optimizer, PreparedLoader<D>, Scheduler<S::Schedule>)> {
        let known = AutoValues {
            data_parallel_size: Some(self.world().size as u64),
            micro_batch_size_per_rank: loader.samples_per_rank(self.world().size).map(|size| size as u64),
            gradient_accumulation_steps: Some(self.accumulation().steps()),
            ..AutoValues::default()
        };
        let config = self.settings().deepspeed.as_ref();
        let config = crate::deepspeed::fill(config, known, rule.configured(), schedule.configured())?;
        let rule = rule.into_rule(config.as_ref())?;
        let schedule = schedule.into_schedule(config.as_ref())?;
        let optimizer = self.prepare_optimizer(rule)?;
        let loader = self.prepare_loader(loader)?;
        let scheduler = Scheduler::new(schedule, &optimizer);
        self.registry().add_numbered("scheduler", scheduler.position());
        Ok((optimizer, loader, scheduler))
    }

    /// Shards a data loader over the ranks.
    ///
    /// # Errors
    /// [`Error::Loader`] when the data cannot serve this world.
    pub fn prepare_loader<D: Source>(&self, loader: DataLoader<D>) -> Result<PreparedLoader<D>> {
        let loader = PreparedLoader::new(
            loader,
            self.world(),
            self.communicator(),
            self.device(),
            self.seed(),
            Arc::clone(self.accumulation()),
        )?;
        crate::agreement::check_alike(&**self.communicator(), "data loader", &loader.described())?;
        self.registry().add_numbered("loader", loader.position());
        Ok(loader)
    }

    /// Begins a micro-batch; call it first in the loop when gradients accumulate over several.
    ///
    /// Until the window's last micro-batch (and the loader's), `backward` keeps gradients on this rank, and `step`,
    /// `zero_grad` and the scheduler do nothing.
    pub fn accumulate(&self) {
        self.accumulation().begin_micro_batch();
    }

    /// Runs `work`, in which every backward keeps its gradients on this rank, also one that ends an accumulation window.
    ///
    /// The last backward before a step must lie outside, or follow `trigger_sync_in_backward`:
    /// a step of gradients that are not reduced is an error. Sharded gradients (ZeRO-2 and -3, FSDP) are reduced all the same.
    /// Where the backward runs is what counts, not where the forward did.
    pub fn no_sync<R>(&self, work: impl FnOnce() -> R) -> R {
        let _scope = self.accumulation().stay_local();
        work()
    }

    /// Makes the next backward reduce all gradients held over the ranks, also inside `no_sync` and inside
    /// an accumulation window; called by all ranks. When the optimizer steps does not change by it.
    pub fn trigger_sync_in_backward(&self) {
        self.accumulation().trigger();
    }

    /// Runs `work`, the forward and the loss, in which layers of [`nn`](crate::nn) compute products of f32 in the run's
    /// precision; where [`AcceleratorBuilder::autocast`](crate::AcceleratorBuilder::autocast) is not set, it only runs `work`.
    ///
    /// [`nn::Linear`](crate::nn::Linear) and [`nn::causal_attention`](crate::nn::causal_attention()) round what they multiply to
    /// bf16 (or f16) and give f32; everything else computes in f32: norms, softmax, loss, and the sums between blocks. The
    /// backward needs no scope. The dtypes of all tensors are what they are outside, so that nothing has to be converted.
    pub fn autocast<R>(&self, work: impl FnOnce() -> R) -> R {
        let settings = self.settings();
        if !settings.autocast || settings.compute_dtype() == candle_core::DType::F32 {
            return work();
        }
        self.note_autocast();
        Autocast::to(settings.compute_dtype()).during(work)
    }

    /// Says whether this micro-batch ends an accumulation window.
    pub fn sync_gradients(&self) -> bool {
        self.accumulation().synchronises()
    }

    /// Says whether the batch that the loop is at is the last of its loader; loops may lie within each other, and the
    /// innermost counts. False outside of loops.
    pub fn end_of_dataloader(&self) -> bool {
        self.accumulation().current_batch().is_some_and(|batch| batch.last)
    }

    /// Returns how many samples of the data set all ranks together have in this step, those not counted that fill up; in
    /// the last batch of a loader, and `None` elsewhere.
    pub fn remainder(&self) -> Option<usize> {
        let batch = self.accumulation().current_batch().filter(|batch| batch.last)?;
        Some(batch.fresh_together)
    }

    /// Says whether this is rank 0.
    pub fn is_main_process(&self) -> bool {
        self.world().is_main()
    }

    /// Says whether this is the first rank of its host.
    pub fn is_local_main_process(&self) -> bool {
        self.world().is_local_main()
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// When a rank is lost or late.
    pub fn wait_for_everyone(&self) -> Result<()> {
        Ok(self.communicator().barrier()?)
    }

    /// Makes all ranks succeed or fail together: the value if every rank has one, else the same failure everywhere.
    ///
    /// Use it after work that each rank does alone, such as reading files. Rank 0 gets the failing rank's message;
    /// the others get [`Error::ReportedByMain`], so that a program can print the message once.
    ///
    /// # Errors
    /// As said above, and when the group fails.
    pub fn together<T, E: std::fmt::Display>(&self, outcome: Result<T, E>) -> Result<T> {
        crate::together::together(&**self.communicator(), outcome)
    }

    /// Prints one line, on rank 0 only; does nothing when nobody reads it any more.
    pub fn print(&self, line: impl std::fmt::Display) {
        if self.is_main_process() {
            // `println!` would panic when, say, `head` has read enough, and end a run that is well.
            let _ = writeln!(std::io::stdout(), "{line}");
        }
    }

    fn check_alike(&self, operation: &'static str, tensor: &Tensor, any_size: bool) -> Result<()> {
        if !self.settings().debug_mode {
            return Ok(());
        }
        crate::shape_check::check_alike(&**self.communicator(), operation, tensor, any_size)
    }

    /// Returns all ranks' tensors joined along dimension 0; they have one shape (see `pad_across_processes`). Lists, tuples
    /// and maps of tensors are gathered one by one, as in all methods on [`Nested`].
    ///
    /// # Errors
    /// When shapes or dtypes differ, or the group fails.
    pub fn gather<N: Nested>(&self, tensors: &N) -> Result<N> {
        tensors.map_tensors(|tensor| {
            self.check_alike("gather", tensor, false)?;
            Ok(self.communicator().all_gather_tensor(tensor)?)
        })
    }

    /// Returns all ranks' results of this step, one row (dimension 0) for each sample of the data set: rows of samples that
    /// only fill up a last batch are left out. So the results of an epoch are those of every sample, once.
    ///
    /// Called in a loop over a loader, whose batch has as many rows. Outside of such a loop it joins the rows that ranks
    /// have, which may be different numbers.
    ///
    /// # Errors
    /// [`Error::Metrics`], on all ranks that call it, when a tensor does not have one row for each sample of the batch, or
    /// some rank has no batch in this step, which only happens without `even_batches`.
    pub fn gather_for_metrics<N: Nested>(&self, tensors: &N) -> Result<N> {
        crate::metrics::gather(&**self.communicator(), self.accumulation().current_batch(), tensors)
    }

    /// Returns all ranks' values in one list, in rank order; they travel as JSON.
    ///
    /// # Errors
    /// When a value cannot be written as JSON or read from it, as numbers that are not finite; or the group fails.
    pub fn gather_objects<T: Serialize + DeserializeOwned>(&self, values: &[T]) -> Result<Vec<T>> {
        crate::objects::gather_objects(&**self.communicator(), values)
    }

    /// Returns rank `from`'s value; it travels as JSON.
    ///
    /// # Errors
    /// [`Error::Setting`] when there is no such rank; else as [`gather_objects`](#method.gather_objects).
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(&self, value: &T, from: usize) -> Result<T> {
        let is_from = self.world().rank == from;
        let own = if is_from { std::slice::from_ref(value) } else { &[] };
        let told = crate::objects::gather_objects(&**self.communicator(), own)?;
        told.into_iter().next().ok_or_else(|| Error::Setting {
            setting: "broadcast_object from",
            value: from.to_string(),
            expected: format!("a rank from 0 to {}", self.world().size - 1),
        })
    }

    /// Does for values what `gather_for_metrics` does for tensors: one value for each sample
    /// of the batch.
    ///
    /// # Errors
    /// As both.
    pub fn gather_objects_for_metrics<T: Serialize + DeserializeOwned>(&self, values: &[T]) -> Result<Vec<T>> {
        let batch = self.accumulation().current_batch();
        crate::metrics::gather_objects_of_batch(&**self.communicator(), batch, values)
    }

    /// Returns the reduction of all ranks' tensors, which have one shape.
    ///
    /// # Errors
    /// When shapes or dtypes differ, or the group fails.
    pub fn reduce(&self, tensor: &Tensor, op: ReduceOp) -> Result<Tensor> {
        self.check_alike("reduce", tensor, false)?;
        Ok(self.communicator().all_reduce_tensor(tensor, op)?)
    }

    /// Returns the reduction of all ranks' tensors, multiplied by `scale`.
    ///
    /// # Errors
    /// As [`reduce`](trait.Accelerator.html#method.reduce).
    pub fn reduce_scaled(&self, tensor: &Tensor, op: ReduceOp, scale: f64) -> Result<Tensor> {
        Ok((self.reduce(tensor, op)? * scale)?)
    }

    /// Returns rank `from`'s tensors; the others' give only shape and dtype.
    ///
    /// # Errors
    /// When shapes or dtypes differ, `from` is no rank, or the group fails.
    pub fn broadcast<N: Nested>(&self, tensors: &N, from: usize) -> Result<N> {
        tensors.map_tensors(|tensor| {
            self.check_alike("broadcast", tensor, false)?;
            Ok(self.communicator().broadcast_tensor(tensor, from)?)
        })
    }

    /// Pads dimension `dim` with `value`, at its end, to the largest size that any rank has.
    ///
    /// # Errors
    /// When a tensor has no such dimension, ranks' dtypes differ, or the group fails.
    pub fn pad_across_processes<N: Nested>(&self, tensors: &N, dim: usize, value: f64) -> Result<N> {
        tensors.map_tensors(|tensor| {
            self.check_alike("pad_across_processes", tensor, true)?;
            crate::tensors::pad_across_processes(&**self.communicator(), tensor, dim, value)
        })
    }
}

/// Refuses a call inside the loop before the accelerator knows where windows end.
pub(crate) fn check_announced(accumulation: &Accumulation) -> Result<()> {
    if accumulation.is_announced() {
        return Ok(());
    }
    Err(Error::Order {
        what: "backward",
        hint: format!(
            "gradients accumulate over {} micro-batches; call accelerator.accumulate() first in the loop",
            accumulation.steps()
        ),
    })
}
