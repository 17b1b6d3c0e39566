//! The engine: one model's parameters, gradients and optimizer on one rank.

mod agreement;
mod backward;
mod checkpoint;
mod local_steps;

pub(crate) use checkpoint::Reading;

use crate::anomaly::AnomalyWatch;
use crate::candle_optimizer::{CandleOptimizer, SharesInVariables};
use crate::device::{Intent, Staging};
use crate::gathered::Gathered;
use crate::gradients::{Gradients, bytes_of};
use crate::layout::BucketLayout;
use crate::loss_guard::LossGuard;
use crate::mesh::Mesh;
use crate::optimizer::{assign, in_range, warn_of_empty};
use crate::parameter::{Home, Parameter};
use crate::parameters::{Parameters, Receivers};
use crate::stepper::Stepper;
use crate::storage::is_managed_dtype;
use crate::units::Units;
use crate::var_builder::ManagedBackend;
use crate::{
    Anomaly, DiskOptions, EngineOptions, Error, LocalTensor, LossScaleState, MemoryReport, Norm, OptimizerRule,
    ParameterInfo, ParameterSet, PowerSgd, Residence, Result, ShardingStrategy, Stepped, Tier, Weights,
};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use sconce_collectives::{Buffer, Communicator, Traffic};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One model's managed parameters, their gradients and their optimizer.
///
/// All ranks call the same methods in the same order.
#[derive(Debug)]
pub struct Engine {
    mesh: Arc<Mesh>,
    strategy: Arc<dyn ShardingStrategy>,
    options: Options,
    parameters: Arc<Parameters>,
    gradients: Arc<Gradients>,
    units: Arc<Units>,
    staging: Arc<Staging>,
    optimizer: Mutex<Option<Optimizer>>,
    loss_guard: Mutex<LossGuard>,
    /// Whether each rank steps by its own gradients.
    steps_locally: AtomicBool,
}

/// What the engine itself looks up of its options.
#[derive(Debug)]
struct Options {
    find_unused_parameters: bool,
    detect_anomaly: bool,
    first_bucket_bytes: usize,
    bucket_bytes: usize,
    reduce_dtype: DType,
    power_sgd: Option<PowerSgd>,
    disk: Option<DiskOptions>,
}

/// What updates the parameters.
#[derive(Debug)]
enum Optimizer {
    Rule(Stepper),
    Candle(SharesInVariables),
}

impl Engine {
    /// Makes an engine for the ranks of `communicator`; with [`EngineOptions::shard_group`] called by all of them.
    ///
    /// # Errors
    /// [`Error::Setting`] for a loss scale out of range, for dtypes other than f32, bf16 and f16, and for groups that do not divide the ranks; failures of the group.
    pub fn new(communicator: Arc<dyn Communicator>, options: EngineOptions) -> Result<Self> {
        let loss_guard = LossGuard::new(&options)?;
        options.power_sgd.iter().try_for_each(PowerSgd::check)?;
        for (setting, dtype) in [
            ("reduce_dtype", Some(options.reduce_dtype)),
            ("output_dtype", options.output_dtype),
        ] {
            if let Some(dtype) = dtype.filter(|dtype| !is_managed_dtype(*dtype)) {
                return Err(Error::Setting {
                    setting,
                    value: dtype.as_str().into(),
                    expected: "f32, bf16 or f16",
                });
            }
        }
        let strategy: Arc<dyn ShardingStrategy> = Arc::from(options.strategy);
        let mesh = Arc::new(Mesh::new(communicator, options.shard_group)?);
        let staging = Arc::new(Staging::new(options.emulate_device));
        let parameters = Arc::new(Parameters::new(
            Arc::clone(&strategy),
            (options.frozen, options.keep_in_f32),
            (options.units, options.recompute),
            mesh.place(),
            Arc::clone(&staging),
        ));
        let gradients = Arc::new(Gradients::new(Arc::clone(&staging)));
        if options.detect_anomaly {
            gradients.watch(AnomalyWatch::new(!loss_guard.skips()));
        }
        let units = Units::new(
            Arc::clone(&mesh.shard),
            options.gathering,
            options.disk.clone(),
            Arc::clone(&parameters),
            Arc::clone(&gradients),
            (options.cast_inputs, options.output_dtype),
        );
        Ok(Self {
            mesh,
            strategy,
            options: Options {
                find_unused_parameters: options.find_unused_parameters,
                detect_anomaly: options.detect_anomaly,
                first_bucket_bytes: options.first_bucket_bytes,
                bucket_bytes: options.bucket_bytes,
                reduce_dtype: options.reduce_dtype,
                power_sgd: options.power_sgd,
                disk: options.disk,
            },
            parameters,
            gradients,
            units: Arc::new(units),
            staging,
            optimizer: Mutex::new(None),
            loss_guard: Mutex::new(loss_guard),
            steps_locally: AtomicBool::new(false),
        })
    }

    /// Returns a `VarBuilder` whose tensors are managed parameters, on the CPU or on a CUDA device; for building one model.
    ///
    /// # Errors
    /// None in this version; a parameter that cannot be loaded, and a device that can have none, are errors of
    /// `VarBuilder::get`. A CUDA device must have one stream for all threads (`Device::new_cuda_with_stream`).
    pub fn var_builder(&self, weights: Weights, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
        let backend = ManagedBackend {
            parameters: Arc::clone(&self.parameters),
            receivers: Receivers {
                gradients: Arc::clone(&self.gradients),
                units: Arc::downgrade(&self.units),
            },
            units: Arc::clone(&self.units),
            source: Arc::new(weights.into()),
        };
        Ok(VarBuilder::from_backend(Box::new(backend), dtype, device.clone()))
    }

    /// Returns how many bytes of training state this rank holds.
    pub fn memory(&self) -> MemoryReport {
        let (gradients, buffers) = self.gradients.bytes();
        let whole = self.parameters.all();
        let (_, shards) = self.parameters.units();
        let held = whole.iter().map(Parameter::bytes);
        let held = held.chain(shards.iter().map(|shard| shard.bytes()));
        let (parameters, masters) = held.fold((0, 0), |sum, bytes| (sum.0 + bytes.0, sum.1 + bytes.1));
        let live = self.units.live();
        let (variables, (optimizer_state, on_disk)) = match self.optimizer().as_ref() {
            Some(Optimizer::Rule(stepper)) => (0, stepper.bytes()),
            Some(Optimizer::Candle(shares)) => (shares.bytes(), (0, 0)),
            None => (0, (0, 0)),
        };
        let (shares_on_disk, shares_in_passing) = self.units.disk_bytes();
        MemoryReport {
            parameters: parameters as u64,
            masters: (masters + variables) as u64,
            gradients,
            optimizer_state,
            on_disk: on_disk + shares_on_disk,
            buffers: buffers + shares_in_passing + self.staging.bytes() as u64,
            gathered: live.bytes as u64,
            spare: self.units.spare_bytes() as u64,
            gathered_peak: live.peak_bytes as u64,
        }
    }

    /// Returns the choice of where state lives.
    pub fn strategy(&self) -> &Arc<dyn ShardingStrategy> {
        &self.strategy
    }

    /// Returns the group of all ranks.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.mesh.world
    }

    /// Returns what this rank has moved in all groups of the engine, by kind of operation.
    pub fn traffic(&self) -> Vec<Traffic> {
        self.mesh.traffic()
    }

    /// Returns what is known of every parameter, in order of creation.
    pub fn parameters(&self) -> Vec<Arc<ParameterInfo>> {
        self.parameters
            .all()
            .into_iter()
            .map(|parameter| parameter.info)
            .collect()
    }

    /// Returns what is known of the parameters that are not trained, in order of creation.
    pub fn frozen_parameters(&self) -> Vec<Arc<ParameterInfo>> {
        let parameters = self.parameters.all().into_iter();
        let frozen = parameters.filter(|parameter| !parameter.is_trained);
        frozen.map(|parameter| parameter.info).collect()
    }

    /// Returns every parameter's name and current values, in order of name; called by all ranks, of which those that
    /// `wanted` is not said for get nothing.
    ///
    /// Sharded parameters are gathered unit by unit and copied; others are the tensors that the model computes with.
    ///
    /// # Errors
    /// Failures of the group.
    pub fn tensors(&self, wanted: bool) -> Result<Vec<(String, Tensor)>> {
        let parameters = self.parameters.all();
        let mut tensors = Vec::new();
        let (_, shards) = self.parameters.units();
        for shard in &shards {
            let numbers: Vec<_> = shard.layout.slots.iter().map(|slot| slot.parameter).collect();
            self.units.with_present(&numbers, || {
                for parameter in numbers.iter().map(|number| &parameters[*number]).filter(|_| wanted) {
                    tensors.push((parameter.info.name.clone(), parameter.tensor.copy()?.detach()));
                }
                Ok(())
            })?;
        }
        let whole = parameters
            .iter()
            .filter(|p| wanted && !matches!(p.home, Home::Shard { .. }));
        tensors.extend(whole.map(|p| (p.info.name.clone(), p.tensor.detach())));
        tensors.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(tensors)
    }

    /// Returns what this rank holds of every parameter, in order of creation; asks nobody.
    ///
    /// # Errors
    /// Failures of candle, and of the disk for shares that lie there.
    pub fn local_tensors(&self) -> Result<Vec<LocalTensor>> {
        let parameters = self.parameters.all();
        let place = self.mesh.place();
        parameters
            .iter()
            .map(|parameter| LocalTensor::of(parameter, place))
            .collect()
    }

    /// Gathers some parameters for reading while `work` runs; called by all ranks.
    ///
    /// # Errors
    /// Those of `work`, and failures of the group.
    pub fn read<R>(&self, which: &ParameterSet, work: impl FnOnce(&Gathered<'_>) -> Result<R>) -> Result<R> {
        let parameters = self.parameters.all();
        let numbers = self.numbers_of(which, &parameters);
        self.units.with_present(&numbers, || {
            work(&Gathered::new(numbers.iter().map(|number| &parameters[*number]), false))
        })
    }

    /// Gathers some parameters while `work` runs, then gives all ranks the values that it set on rank `rank`; called by
    /// all ranks.
    ///
    /// # Errors
    /// [`Error::Setting`] for a rank that is not in the group; [`Error::Order`] while a unit runs and in another scope;
    /// those of `work`, which end the group, and failures of the group.
    pub fn edit<R>(
        &self,
        which: &ParameterSet,
        rank: usize,
        work: impl FnOnce(&Gathered<'_>) -> Result<R>,
    ) -> Result<R> {
        let parameters = self.parameters.all();
        let numbers = self.numbers_of(which, &parameters);
        if rank >= self.mesh.world.size() {
            return Err(Error::Setting {
                setting: "rank",
                value: rank.to_string(),
                expected: "a rank of the group",
            });
        }
        if let Some(number) = numbers.iter().find(|number| !parameters[**number].has_its_values()) {
            return Err(Error::Edit {
                name: parameters[*number].info.name.clone(),
                reason: "its f32 values are on disk since the first step; edit before it, or keep them in memory"
                    .into(),
            });
        }
        self.units.release_all()?;
        let outcome = self.units.with_present(&numbers, || {
            let scope = Gathered::new(numbers.iter().map(|number| &parameters[*number]), true);
            let result = work(&scope)?;
            scope.publish(&self.mesh, rank)?;
            Ok(result)
        });
        if let Err(error) = &outcome {
            // Peers wait for this rank's values, or it for theirs.
            self.mesh.abort(&error.to_string());
        }
        outcome
    }

    fn numbers_of(&self, which: &ParameterSet, parameters: &[Parameter]) -> Vec<usize> {
        let contained = |number: &usize| which.contains(&parameters[*number].info);
        (0..parameters.len()).filter(contained).collect()
    }

    /// Returns what may surprise about a model that has been built: that nothing is sharded or computed again although it
    /// was asked for. Each is one line.
    pub fn notices(&self) -> Vec<String> {
        let (parts, shards) = self.parameters.units();
        let parameters = self.parameters.all();
        let mut elements = parts.iter().map(|part| -> usize {
            let own = part.parameters.iter();
            own.map(|number| parameters[*number].info.elements()).sum()
        });
        let why = match elements.clone().max() {
            None => "the model declares no parts: build its blocks with unit or unit_of_class".to_owned(),
            Some(largest) => format!(
                "the policy chooses none of the {} parts that the model declares, of which the largest has {largest} elements",
                elements.by_ref().count()
            ),
        };
        let is_to_be_sharded = |p: &Parameter| self.strategy.place(&p.info).parameter == Residence::Sharded;
        let mut notices = Vec::new();
        if shards.is_empty() && parameters.iter().any(is_to_be_sharded) {
            notices.push(format!("no parameter is sharded, all are whole on every rank: {why}"));
        }
        if self.parameters.may_recompute() && !parts.iter().any(|part| part.kind.is_recomputed) {
            notices.push(format!("nothing computes again in the backward: {why}"));
        }
        notices
    }

    /// Returns the classes that the model's parts were declared with ([`unit_of_class`](crate::unit_of_class)), sorted,
    /// each once.
    pub fn unit_classes(&self) -> Vec<String> {
        let (parts, _) = self.parameters.units();
        let mut classes = Vec::from_iter(parts.into_iter().map(|part| part.class));
        classes.retain(|class| !class.is_empty());
        classes.sort();
        classes.dedup();
        classes
    }

    /// Sets the update rule, which may be several ([`ParameterGroups`](crate::ParameterGroups)), after the model has been built; checks that all ranks built the same model and gives all
    /// of them rank 0's values.
    ///
    /// # Errors
    /// [`Error::Setting`] for a bad setting, [`Error::DifferentModels`], [`Error::UnsupportedPlacement`].
    pub fn set_optimizer(&self, rule: Box<dyn OptimizerRule>) -> Result<()> {
        rule.check()?;
        let parameters = self.parameters.all();
        let groups = assign(&*rule, parameters.iter().map(|parameter| &*parameter.info));
        self.complete_model(&parameters, &groups)?;
        if self.mesh.world.rank() == 0 {
            let trained = parameters.iter().zip(&groups).filter(|(p, _)| p.is_trained);
            warn_of_empty(&*rule, &trained.map(|(_, group)| *group).collect::<Vec<_>>());
        }
        let (disk, rank) = (self.options.disk.clone(), self.mesh.shard.rank());
        *self.optimizer() = Some(Optimizer::Rule(Stepper::new(rule, groups, disk, rank)));
        Ok(())
    }

    /// Sets an optimizer of candle's kind in the place of an update rule, and returns its own learning rate; else as
    /// [`Engine::set_optimizer`].
    ///
    /// [`Engine::step`] sets its learning rate. A step of it that fails ends the group, because other ranks' may not have
    /// failed.
    ///
    /// # Errors
    /// As there, and the optimizer's own.
    pub fn set_candle_optimizer(&self, optimizer: CandleOptimizer) -> Result<f64> {
        let parameters = self.parameters.all();
        self.complete_model(&parameters, &vec![0; parameters.len()])?;
        let is_on_disk = |p: &&Parameter| p.is_trained && p.placement.optimizer_state_tier == Tier::Disk;
        if let Some(parameter) = parameters.iter().find(is_on_disk) {
            return Err(Error::UnsupportedPlacement {
                strategy: self.strategy.name().into(),
                name: parameter.info.name.clone(),
                reason: "a candle optimizer keeps its state in memory; use one of this crate's rules for state on disk",
            });
        }
        let optimizer = optimizer.over(&parameters, self.mesh.shard.rank(), self.mesh.shard.size())?;
        let learning_rate = optimizer.learning_rate();
        *self.optimizer() = Some(Optimizer::Candle(optimizer));
        Ok(learning_rate)
    }

    /// Scales the gradients held so that their global L2 norm is at most `max_norm`; returns the norm before.
    ///
    /// The factor is `min(1, max_norm / (norm + 1e-6))`, as in PyTorch; a norm that is not a number makes all gradients
    /// not a number.
    ///
    /// # Errors
    /// [`Error::Order`] after a failed backward, [`Error::Setting`] when `max_norm` is not above 0.
    pub fn clip_grad_norm(&self, max_norm: f64) -> Result<f64> {
        self.clip_grad_norm_of(Norm::L2, max_norm)
    }

    /// Does what [`Engine::clip_grad_norm`] does, with another norm.
    ///
    /// # Errors
    /// As there.
    pub fn clip_grad_norm_of(&self, norm: Norm, max_norm: f64) -> Result<f64> {
        in_range("max_norm", max_norm, "a number above 0", max_norm > 0.0)?;
        let norm = self.grad_norm_of(norm)?;
        let factor = max_norm / (norm + 1e-6);
        // `min` would turn a factor that is not a number into 1.
        self.gradients.scale_by(if factor > 1.0 { 1.0 } else { factor as f32 });
        Ok(norm)
    }

    /// Limits every element of the gradients held to the range from `-limit` to `limit`.
    ///
    /// # Errors
    /// [`Error::Order`] after a failed backward, [`Error::Setting`] when `limit` is not above 0.
    pub fn clip_grad_value(&self, limit: f64) -> Result<()> {
        in_range("clip_value", limit, "a number above 0", limit > 0.0)?;
        self.gradients.clamp(limit as f32)
    }

    /// Returns the global L2 norm of the gradients held.
    ///
    /// # Errors
    /// [`Error::Order`] after a failed backward.
    pub fn grad_norm(&self) -> Result<f64> {
        self.grad_norm_of(Norm::L2)
    }

    /// Returns another global norm of the gradients held.
    ///
    /// # Errors
    /// [`Error::Order`] after a failed backward.
    pub fn grad_norm_of(&self, norm: Norm) -> Result<f64> {
        self.gradients.norm(norm)
    }

    /// Updates all parameters that hold a gradient; the gradients stay until [`Engine::zero_grad`].
    ///
    /// With loss scaling or [`EngineOptions::skip_nonfinite`] all ranks skip the step when a gradient of any rank is not
    /// finite: the gradients are forgotten, and parameters, optimizer state and step counts stay as they were. The loss
    /// scale changes last.
    ///
    /// # Errors
    /// [`Error::Order`] before an optimizer is set, and when no gradients are held that the last backward synchronised;
    /// [`Error::LossScaleAtMinimum`].
    pub fn step(&self, learning_rate: f64) -> Result<Stepped> {
        let _span = tracing::debug_span!("optimizer step").entered();
        let mut optimizer = self.optimizer();
        let Some(optimizer) = optimizer.as_mut() else {
            return Err(Error::Order {
                what: "step",
                hint: "set an optimizer first (prepare)",
            });
        };
        self.gradients.check_synchronised()?;
        self.units.release_all()?;
        if self.loss_guard().skips() && !self.gradients.are_finite()? {
            self.gradients.clear();
            self.loss_guard().note(Stepped::Skipped)?;
            return Ok(Stepped::Skipped);
        }
        let parameters = self.parameters.all();
        let gradient_scale = self.gradients.scale();
        let outcome = self.gradients.with_held(|buckets, holds| match optimizer {
            Optimizer::Rule(stepper) => {
                let gpu = self.staging.any_gpu();
                stepper.step(learning_rate, gradient_scale, buckets, holds, &parameters, gpu)
            }
            Optimizer::Candle(shares) => shares.step(learning_rate, gradient_scale, buckets, holds, &parameters),
        });
        if let Err(error) = outcome.flatten() {
            // Peers wait for the values that this rank should have updated.
            self.mesh.abort(&error.to_string());
            return Err(error);
        }
        self.exchange_values(&parameters)?;
        self.loss_guard().note(Stepped::Updated)?;
        Ok(Stepped::Updated)
    }

    /// Returns the factor for the next window's losses; 1 without loss scaling.
    pub fn loss_scale(&self) -> f64 {
        self.loss_guard().scale()
    }

    /// Returns how many steps were skipped because gradients were not finite.
    pub fn skipped_steps(&self) -> u64 {
        self.loss_guard().skipped()
    }

    /// Returns the first gradient of the last backward on this rank that was not finite, where
    /// [`EngineOptions::detect_anomaly`] is set.
    pub fn last_anomaly(&self) -> Option<Anomaly> {
        self.gradients.anomaly()
    }

    /// Returns what a checkpoint keeps of the loss scale; `None` without loss scaling.
    pub fn loss_scale_state(&self) -> Option<LossScaleState> {
        self.loss_guard().state()
    }

    /// Goes on with the loss scale of a checkpoint, from the next window on; does nothing without loss scaling.
    ///
    /// # Errors
    /// [`Error::Setting`] for a scale that no run can have.
    pub fn restore_loss_scale(&self, state: LossScaleState) -> Result<()> {
        self.loss_guard().restore(state)
    }

    /// Returns how often the host has looked at state that lies on a GPU, of which each time pages may have moved there and
    /// back: 0 where no state does. Training by rules of this crate does so only where state is first filled, and for
    /// checkpoints and values. What a group that is not NCCL's reads and writes to move it is not counted.
    pub fn host_accesses(&self) -> u64 {
        self.staging.host_accesses()
    }

    /// Forgets all gradients.
    pub fn zero_grad(&self) {
        self.gradients.clear();
    }

    /// Gives every rank the values that other ranks have updated for it.
    fn exchange_values(&self, parameters: &[Parameter]) -> Result<()> {
        let rank = self.mesh.shard.rank();
        let own_part = |layout: &BucketLayout, whole: &mut Buffer| {
            layout.slots.iter().try_for_each(|slot| {
                let place = bytes_of(layout, layout.place(slot, rank));
                let tensor = &parameters[slot.parameter].tensor;
                if whole.is_unified() && tensor.gpu(Tier::Device).is_some() {
                    return Ok(tensor.copy_to_buffer(slot.chunk(rank), whole, place.start)?);
                }
                let place = &mut whole.as_mut_slice::<u8>()[place];
                Ok(tensor.with_values(Intent::Read, slot.chunk(rank), |values| {
                    place.copy_from_slice(values.into_bytes());
                })?)
            })
        };
        let take = |layout: &BucketLayout, whole: &Buffer| {
            layout.slots.iter().try_for_each(|slot| {
                let tensor = &parameters[slot.parameter].tensor;
                if whole.is_unified() && tensor.gpu(Tier::Device).is_some() {
                    let others = (0..layout.parts).filter(|part| *part != rank);
                    let ranges = others.map(|part| {
                        let place = layout.place(slot, part);
                        (slot.chunk(part), bytes_of(layout, place).start)
                    });
                    return Ok(tensor.copy_from_buffer(whole, ranges)?);
                }
                let whole = whole.as_slice::<u8>();
                let own = slot.chunk(rank);
                let (before, after) = (0..own.start, own.end..slot.elements);
                for (others, elements) in [(0..rank, before), (rank + 1..layout.parts, after)] {
                    if elements.is_empty() {
                        continue;
                    }
                    tensor.with_values(Intent::Overwrite, elements.clone(), |values| {
                        let values = values.into_bytes();
                        for part in others {
                            let chunk = slot.chunk(part);
                            let within = chunk.start - elements.start..chunk.end - elements.start;
                            values[bytes_of(layout, within)]
                                .copy_from_slice(&whole[bytes_of(layout, layout.place(slot, part))]);
                        }
                    })?;
                }
                Ok(())
            })
        };
        self.gradients.exchange_parts(own_part, take)
    }

    fn loss_guard(&self) -> MutexGuard<'_, LossGuard> {
        self.loss_guard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn optimizer(&self) -> MutexGuard<'_, Option<Optimizer>> {
        self.optimizer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
