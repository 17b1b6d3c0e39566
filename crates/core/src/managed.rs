//! The accelerator over `sconce-zero`'s engine: one device or many ranks, by the engine's strategy.

use crate::accelerator::check_announced;
use crate::accumulation::Accumulation;
use crate::checkpoint::{Background, Registry, Stateful};
use crate::clipping::StepClipping;
use crate::deepspeed::GradientReduction;
use crate::fp8::Fp8Scaling;
use crate::spent_losses::SpentLosses;
use crate::trackers::Trackers;
use crate::{Accelerator, Error, Optimizer, Result, RunSettings, Sharding};
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use sconce_collectives::{Communicator, Connection, Traffic, World};
use sconce_zero::{
    CandleOptimizer, Engine, EngineOptions, LocalTensor, MemoryReport, OptimizerRule, ParameterSet, RandomState,
    ShardingStrategy, Weights,
};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

/// An accelerator whose parameters are managed by an [`Engine`].
#[derive(Debug)]
pub(crate) struct ManagedAccelerator {
    world: World,
    engine: Arc<Engine>,
    device: Device,
    /// Shared by the accelerators of one loop's models.
    seed: Arc<AtomicU64>,
    settings: RunSettings,
    accumulation: Arc<Accumulation>,
    clipping: Arc<StepClipping>,
    spent_losses: SpentLosses,
    fp8: Option<Arc<Fp8Scaling>>,
    /// Whether something has been computed within `autocast`.
    is_autocast: Arc<AtomicBool>,
    trigger: Arc<AtomicBool>,
    registry: Arc<Registry>,
    background: Arc<Background>,
    trackers: Arc<Mutex<Trackers>>,
    /// Last, so that the store outlives the group.
    _connection: Option<Arc<Connection>>,
}

impl ManagedAccelerator {
    pub(crate) fn new(
        world: World,
        connection: Option<Connection>,
        engine: Engine,
        device: Device,
        seed: u64,
        settings: RunSettings,
    ) -> Self {
        seed_rank(seed, &world);
        let (engine, registry) = (Arc::new(engine), Arc::<Registry>::default());
        registry.add_engine(&engine);
        let fp8 = scaling_of(&settings, &registry);
        Self {
            world,
            engine,
            device,
            seed: Arc::new(AtomicU64::new(seed)),
            accumulation: Arc::new(Accumulation::new(
                settings.batch.accumulation_steps,
                settings.synchronisation,
            )),
            clipping: Arc::new(StepClipping::new(settings.clipping.clone())),
            fp8,
            is_autocast: Arc::default(),
            settings,
            spent_losses: SpentLosses::default(),
            trigger: Arc::default(),
            registry,
            background: Arc::default(),
            trackers: Arc::default(),
            _connection: connection.map(Arc::new),
        }
    }

    /// Fails if a wrap policy names classes that the model does not have.
    fn check_classes(&self) -> Result<()> {
        match &self.settings.fully_sharded {
            Some(run) => Ok(run.auto_wrap_policy.check_classes(&self.engine.unit_classes())?),
            None => Ok(()),
        }
    }

    /// Fails unless all ranks have this optimizer and these settings.
    fn check_alike(&self, optimizer: &str) -> Result<()> {
        let own = format!("{optimizer}, {:?}", self.settings.in_words());
        crate::agreement::check_alike(&**self.communicator(), "optimizer and settings", &own)
    }

    /// Logs what may surprise, once for all ranks.
    fn tell(&self) {
        if self.world.is_main() {
            self.engine
                .notices()
                .iter()
                .for_each(|notice| tracing::warn!("{notice}"));
        }
    }

    /// Refuses what can be no backward of this loop, before anything is changed.
    fn check_backward(&self, loss: &Tensor) -> Result<()> {
        check_announced(&self.accumulation)?;
        self.spent_losses.check(loss.id())?;
        if self.settings.autocast && self.settings.compute_dtype() != DType::F32 && !self.is_autocast.load(Relaxed) {
            return Err(Error::Order {
                what: "backward",
                hint: "the run is set to autocast, and nothing has been computed within it, but in f32; compute the loss in \
                       accelerator.autocast(|| ..)"
                    .into(),
            });
        }
        Ok(())
    }

    /// Takes note of a backward that has been.
    fn end_backward(&self, loss: &Tensor) -> Result<()> {
        self.spent_losses.spend(loss.id());
        match &self.fp8 {
            Some(scaling) => scaling.update(&**self.communicator()),
            None => Ok(()),
        }
    }

    fn optimizer(&self, learning_rate: f64) -> Optimizer {
        Optimizer::new(
            Arc::clone(&self.engine),
            Arc::clone(&self.accumulation),
            Arc::clone(&self.clipping),
            self.settings.stepping,
            learning_rate,
        )
    }
}

impl Accelerator for ManagedAccelerator {
    fn world(&self) -> &World {
        &self.world
    }

    fn communicator(&self) -> &Arc<dyn Communicator> {
        self.engine.communicator()
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn seed(&self) -> u64 {
        self.seed.load(Relaxed)
    }

    fn set_seed(&self, seed: u64) {
        self.seed.store(seed, Relaxed);
        seed_rank(seed, &self.world);
    }

    fn settings(&self) -> &RunSettings {
        &self.settings
    }

    fn fp8(&self) -> Option<&Arc<Fp8Scaling>> {
        self.fp8.as_ref()
    }

    fn note_autocast(&self) {
        self.is_autocast.store(true, Relaxed);
    }

    fn accumulation(&self) -> &Arc<Accumulation> {
        &self.accumulation
    }

    fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    fn background(&self) -> &Background {
        &self.background
    }

    fn trackers(&self) -> &Mutex<Trackers> {
        &self.trackers
    }

    fn trigger(&self) -> &AtomicBool {
        &self.trigger
    }

    fn for_another_model(&self, frozen: ParameterSet) -> Result<Box<dyn Accelerator>> {
        let custom: Option<Box<dyn ShardingStrategy>> = match self.settings.sharding {
            Sharding::Custom(_) => Some(Box::new(Arc::clone(self.engine.strategy()))),
            _ => None,
        };
        let options = EngineOptions {
            frozen,
            ..self.settings.engine_options(custom, &self.world)?
        };
        let engine = Arc::new(Engine::new(Arc::clone(self.engine.communicator()), options)?);
        self.registry.add_engine(&engine);
        Ok(Box::new(Self {
            world: self.world.clone(),
            engine,
            device: self.device.clone(),
            seed: Arc::clone(&self.seed),
            settings: self.settings.clone(),
            accumulation: Arc::clone(&self.accumulation),
            clipping: Arc::new(StepClipping::new(self.settings.clipping.clone())),
            spent_losses: SpentLosses::default(),
            fp8: scaling_of(&self.settings, &self.registry),
            is_autocast: Arc::clone(&self.is_autocast),
            trigger: Arc::clone(&self.trigger),
            registry: Arc::clone(&self.registry),
            background: Arc::clone(&self.background),
            trackers: Arc::clone(&self.trackers),
            _connection: self._connection.clone(),
        }))
    }

    fn var_builder(&self, weights: Weights) -> Result<VarBuilder<'static>> {
        let dtype = self.settings.parameter_dtype();
        let vb = self.engine.var_builder(weights, dtype, &self.device)?;
        Ok(match &self.fp8 {
            Some(scaling) => crate::fp8::with_scaling(vb, Arc::clone(scaling)),
            None => vb,
        })
    }

    fn prepare_optimizer(&self, rule: Box<dyn OptimizerRule>) -> Result<Optimizer> {
        self.check_classes()?;
        self.check_alike(&format!("{rule:?}"))?;
        let learning_rate = rule.base_learning_rate();
        self.engine.set_optimizer(rule)?;
        self.tell();
        Ok(self.optimizer(learning_rate))
    }

    fn prepare_candle_optimizer(&self, optimizer: CandleOptimizer) -> Result<Optimizer> {
        self.check_classes()?;
        self.check_alike("an optimizer of candle's kind")?;
        let learning_rate = self.engine.set_candle_optimizer(optimizer)?;
        self.tell();
        Ok(self.optimizer(learning_rate))
    }

    fn backward(&self, loss: &Tensor) -> Result<()> {
        self.check_backward(loss)?;
        let steps = self.accumulation.steps() as f64;
        let divisor = match self.settings.reduction {
            GradientReduction::Mean => steps,
            // The engine's mean over the ranks, times their number.
            GradientReduction::Sum => steps / self.world.size as f64,
        };
        let weight = self.accumulation.weight();
        let scaled = if divisor == 1.0 && weight == 1.0 {
            loss.clone()
        } else if weight == 0.0 {
            // As a tensor: candle takes a factor of 0 for the end of a graph.
            (loss * loss.zeros_like()?.detach())?
        } else {
            (loss / (divisor / weight))?
        };
        self.engine.backward(&scaled, self.accumulation.take_reduction())?;
        self.end_backward(loss)
    }

    fn backward_weighted(&self, loss: &Tensor, weight: f64) -> Result<()> {
        self.check_backward(loss)?;
        if self.settings.reduction == GradientReduction::Sum {
            return Err(Error::Order {
                what: "backward_weighted",
                hint:
                    "the DeepSpeed configuration sums gradients (`gradient_allreduce_op`), and weights make means; use \
                       backward, or \"mean\" there"
                        .into(),
            });
        }
        // Of a rank whose inputs have ended nothing counts.
        let weight = if self.accumulation.weight() == 0.0 { 0.0 } else { weight };
        let (reduces, completes) = (self.accumulation.take_reduction(), self.accumulation.synchronises());
        self.engine.backward_weighted(loss, weight, reduces, completes)?;
        self.end_backward(loss)
    }

    fn clip_grad_norm(&self, max_norm: f64) -> Result<Option<f64>> {
        self.clipping.check(max_norm)?;
        if !self.accumulation.synchronises() {
            return Ok(None);
        }
        let norm = self.engine.clip_grad_norm(max_norm)?;
        self.clipping.note();
        Ok(Some(norm))
    }

    fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    fn traffic(&self) -> Vec<Traffic> {
        self.engine.traffic()
    }

    fn memory(&self) -> MemoryReport {
        self.engine.memory()
    }

    fn local_state_dict(&self) -> Result<Vec<LocalTensor>> {
        Ok(self.engine.local_tensors()?)
    }

    fn state_dict(&self) -> Result<Vec<(String, Tensor)>> {
        Ok(self.engine.tensors(self.world.is_main())?)
    }
}

/// Makes the scaling of one model, whose state belongs to checkpoints.
fn scaling_of(settings: &RunSettings, registry: &Registry) -> Option<Arc<Fp8Scaling>> {
    let scaling = Arc::new(Fp8Scaling::new(settings.fp8.clone()?));
    registry.add_numbered("fp8 scaling", Arc::clone(&scaling) as Arc<dyn Stateful>);
    Some(scaling)
}

/// Lets what is random on this rank begin anew.
fn seed_rank(seed: u64, world: &World) {
    RandomState::seed(RandomState::seed_of_rank(seed, world.rank));
}
