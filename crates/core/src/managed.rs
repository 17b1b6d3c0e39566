//! The accelerator over `sconce-zero`'s engine: one device or many ranks, by the engine's strategy.

use crate::accelerator::check_announced;
use crate::accumulation::Accumulation;
use crate::checkpoint::{Background, Registry};
use crate::clipping::StepClipping;
use crate::deepspeed::GradientReduction;
use crate::{Accelerator, Optimizer, Result, RunSettings, Sharding};
use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use sconce_collectives::{Communicator, Connection, Traffic, World};
use sconce_zero::{
    CandleOptimizer, Engine, EngineOptions, LocalTensor, MemoryReport, OptimizerRule, ParameterSet, RandomState,
    ShardingStrategy, Weights,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

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
    trigger: Arc<AtomicBool>,
    registry: Arc<Registry>,
    background: Arc<Background>,
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
        Self {
            world,
            engine,
            device,
            seed: Arc::new(AtomicU64::new(seed)),
            accumulation: Arc::new(
                Accumulation::new(settings.batch.accumulation_steps)
                    .sync_with_dataloader(settings.sync_with_dataloader),
            ),
            clipping: Arc::new(StepClipping::new(settings.clipping.clone())),
            settings,
            trigger: Arc::default(),
            registry,
            background: Arc::default(),
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

    /// Logs what may surprise, once for all ranks.
    fn tell(&self) {
        if self.world.is_main() {
            self.engine
                .notices()
                .iter()
                .for_each(|notice| tracing::warn!("{notice}"));
        }
    }

    fn optimizer(&self, learning_rate: f64) -> Optimizer {
        Optimizer::new(
            Arc::clone(&self.engine),
            Arc::clone(&self.accumulation),
            Arc::clone(&self.clipping),
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

    fn accumulation(&self) -> &Arc<Accumulation> {
        &self.accumulation
    }

    fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    fn background(&self) -> &Background {
        &self.background
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
            trigger: Arc::clone(&self.trigger),
            registry: Arc::clone(&self.registry),
            background: Arc::clone(&self.background),
            _connection: self._connection.clone(),
        }))
    }

    fn var_builder(&self, weights: Weights) -> Result<VarBuilder<'static>> {
        let dtype = self.settings.compute_dtype();
        Ok(self.engine.var_builder(weights, dtype, &self.device)?)
    }

    fn prepare_optimizer(&self, rule: Box<dyn OptimizerRule>) -> Result<Optimizer> {
        self.check_classes()?;
        let learning_rate = rule.base_learning_rate();
        self.engine.set_optimizer(rule)?;
        self.tell();
        Ok(self.optimizer(learning_rate))
    }

    fn prepare_candle_optimizer(&self, optimizer: CandleOptimizer) -> Result<Optimizer> {
        self.check_classes()?;
        let learning_rate = self.engine.set_candle_optimizer(optimizer)?;
        self.tell();
        Ok(self.optimizer(learning_rate))
    }

    fn backward(&self, loss: &Tensor) -> Result<()> {
        check_announced(&self.accumulation)?;
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
        Ok(self.engine.backward(&scaled, self.accumulation.synchronises())?)
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

/// Lets what is random on this rank begin anew.
fn seed_rank(seed: u64, world: &World) {
    RandomState::seed(RandomState::seed_of_rank(seed, world.rank));
}
