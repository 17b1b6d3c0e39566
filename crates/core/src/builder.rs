//! Making an accelerator: what the program says is collected here; [`settings`](crate::settings) adds the rest.

use crate::checkpoint::{FolderLock, Keepers};
use crate::deepspeed::{DeepSpeedConfig, MixedPrecision};
use crate::environment as variable;
use crate::fp8::Fp8Recipe;
use crate::managed::ManagedAccelerator;
use crate::schedule::ScheduleAdvance;
use crate::settings::{Environment, ProgramSettings};
use crate::{Accelerator, Checkpoints, DeviceRequest, Error, GradientCompression, Result, RunSettings};
use candle_core::Device;
use sconce_collectives::{Options, World, connect};
use sconce_fsdp::FullyShardedOptions;
use sconce_zero::{
    DiskOptions, Engine, EngineOptions, Gathering, LossScaling, ParameterSet, ShardingStrategy, UnitPolicy,
};
use std::path::PathBuf;
use std::time::Duration;

/// Makes the accelerator that `sconce launch` and the environment describe.
///
/// # Errors
/// A variable that cannot be used, ranks that do not come.
pub fn accelerator() -> Result<Box<dyn Accelerator>> {
    AcceleratorBuilder::default().build()
}

/// Settings of an accelerator; what is not set here comes from the environment, else from a DeepSpeed configuration, else
/// it has its default. What comes of it all is [`RunSettings`].
#[derive(Debug, Default)]
pub struct AcceleratorBuilder {
    program: ProgramSettings,
    seed: Option<u64>,
    strategy: Option<Box<dyn ShardingStrategy>>,
    frozen: ParameterSet,
    timeout: Option<Duration>,
    device: Option<DeviceRequest>,
    connection: Option<(World, std::sync::Arc<dyn sconce_collectives::Communicator>)>,
}

impl AcceleratorBuilder {
    /// Sets over how many micro-batches gradients add up before a step; 1 by default.
    #[must_use]
    pub fn gradient_accumulation_steps(mut self, steps: u64) -> Self {
        self.program.accumulation_steps = Some(steps);
        self
    }

    /// Sets the seed of shuffling and of each rank's [`RandomState`](crate::RandomState); 0 by default.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets where parameters, gradients and optimizer state live; by default the ZeRO stage that the environment or the
    /// DeepSpeed configuration asks for, or [`DataParallel`](crate::DataParallel).
    #[must_use]
    pub fn strategy(mut self, strategy: impl ShardingStrategy + 'static) -> Self {
        self.strategy = Some(Box::new(strategy));
        self
    }

    /// Allows parameters that get no gradient.
    #[must_use]
    pub fn find_unused_parameters(mut self, allow: bool) -> Self {
        self.program.find_unused_parameters = Some(allow);
        self
    }

    /// Looks for what is not finite in loss and gradients: the first parameter whose gradient is not, in the order in which
    /// they come in, is named in an error, or in the log where such steps are skipped. Off by default; costs a pass over the
    /// gradients.
    #[must_use]
    pub fn detect_anomaly(mut self, detect: bool) -> Self {
        self.program.detect_anomaly = detect;
        self
    }

    /// Compares shapes over all ranks before every collective on tensors, and lists them if they differ; by default what
    /// the environment says, else not. Types and numbers of elements are always compared.
    #[must_use]
    pub fn debug_mode(mut self, on: bool) -> Self {
        self.program.debug_mode = Some(on);
        self
    }

    /// Names the parameters that are not trained; none by default. They are sharded and saved as others.
    #[must_use]
    pub fn frozen(mut self, parameters: ParameterSet) -> Self {
        self.frozen = parameters;
        self
    }

    /// Names the parameters that are f32 whatever the run's precision; none by default. Layers of [`nn`](crate::nn) that they
    /// belong to compute in f32, not in fp8 either, and give results of their input's type: what follows them does not change.
    /// Layers of others get f32 parameters beside narrower inputs, which candle refuses to mix.
    #[must_use]
    pub fn keep_in_f32(mut self, parameters: ParameterSet) -> Self {
        self.program.keep_in_f32 = parameters;
        self
    }

    /// Chooses parts of the model ([`unit`](crate::unit())s and others) that compute again in the backward instead of keeping what it needs:
    /// gradient checkpointing, under any strategy. By default none, or what FSDP's `activation_checkpointing` says.
    #[must_use]
    pub fn recompute(mut self, parts: UnitPolicy) -> Self {
        self.program.recompute = Some(parts);
        self
    }

    /// Keeps all parameters and activations f32; within [`autocast`](trait.Accelerator.html#method.autocast) layers of
    /// [`nn`](crate::nn) compute their products in the run's precision, as PyTorch's autocast does. By default parameters
    /// and activations have the run's precision, as in DeepSpeed.
    #[must_use]
    pub fn autocast(mut self, autocast: bool) -> Self {
        self.program.autocast = autocast;
        self
    }

    /// Sets how scales of fp8 come to be, in the place of the environment (`ACCELERATE_FP8_*`); used where the precision is
    /// [`MixedPrecision::Fp8`].
    #[must_use]
    pub fn fp8(mut self, recipe: Fp8Recipe) -> Self {
        self.program.fp8 = Some(recipe);
        self
    }

    /// Sets what the model computes in; f32 by default. Masters and optimizer state are f32 in any case.
    #[must_use]
    pub fn mixed_precision(mut self, precision: MixedPrecision) -> Self {
        self.program.mixed_precision = Some(precision);
        self
    }

    /// Sets how losses are scaled; by default as the precision needs it.
    #[must_use]
    pub fn loss_scaling(mut self, scaling: LossScaling) -> Self {
        self.program.loss_scaling = Some(scaling);
        self
    }

    /// Makes every backward reduce gradients over the ranks, or only the last of an accumulation window; by default only the
    /// last, and every one where gradients are sharded. See [`Synchronisation::each_batch`](crate::Synchronisation).
    #[must_use]
    pub fn sync_each_batch(mut self, each: bool) -> Self {
        self.program.sync_each_batch = Some(each);
        self
    }

    /// Lets the last batch of a loader end an accumulation window early, as it does by default, or not.
    #[must_use]
    pub fn sync_with_dataloader(mut self, ends: bool) -> Self {
        self.program.sync_with_dataloader = Some(ends);
        self
    }

    /// Ties schedulers to optimizer steps, as they are by default; if not, every call of
    /// [`Scheduler::step`](crate::Scheduler::step) counts, also inside a window and after a step that was skipped.
    #[must_use]
    pub fn step_scheduler_with_optimizer(mut self, tied: bool) -> Self {
        self.program.stepping.with_optimizer = tied;
        self
    }

    /// Sets how far an optimizer step takes a schedule; by one by default. See [`ScheduleAdvance`].
    #[must_use]
    pub fn schedule_advance(mut self, advance: ScheduleAdvance) -> Self {
        self.program.stepping.advance = advance;
        self
    }

    /// Sets how gradients are made smaller on their way between ranks; they travel as f32 by default.
    #[must_use]
    pub fn gradient_compression(mut self, compression: GradientCompression) -> Self {
        self.program.gradient_compression = Some(compression);
        self
    }

    /// Sets the norm to which a step clips gradients that the program has not clipped; 0 turns that off.
    #[must_use]
    pub fn gradient_clipping(mut self, max_norm: f64) -> Self {
        self.program.gradient_clipping = Some(max_norm);
        self
    }

    /// Sets the size at which gradient buckets are closed, in bytes of f32; 25 MiB by default.
    #[must_use]
    pub fn bucket_bytes(mut self, bytes: usize) -> Self {
        self.program.bucket_bytes = Some(bytes);
        self
    }

    /// Sets how sharded parameters are gathered; by default as in DeepSpeed.
    #[must_use]
    pub fn gathering(mut self, gathering: Gathering) -> Self {
        self.program.gathering = Some(gathering);
        self
    }

    /// Sets where state on disk lies, for a strategy that puts some there.
    #[must_use]
    pub fn disk(mut self, options: DiskOptions) -> Self {
        self.program.disk = Some(options);
        self
    }

    /// Sets where numbered checkpoints are kept ([`save_checkpoint`](trait.Accelerator.html#method.save_checkpoint)).
    #[must_use]
    pub fn checkpoints(mut self, checkpoints: Checkpoints) -> Self {
        self.program.checkpoints = Some(checkpoints);
        self
    }

    /// Keeps a whole checkpoint on each host, in a folder of its own: for hosts that share no file system. Each rank writes its
    /// own file, and the first ranks of hosts send each other the rest; what hooks write stays on its host. Ranks load from
    /// their own host's folder. By default ranks on all hosts must see one folder.
    #[must_use]
    pub fn save_on_each_node(mut self, each: bool) -> Self {
        self.program.saves_on_each_node = each;
        self
    }

    /// Leaves the values of frozen parameters out of checkpoints if `false`; they are saved by default. Where only adapters are
    /// trained, checkpoints are then as small as these; a run that goes on from one gets the frozen values from where the
    /// run that saved got them.
    #[must_use]
    pub fn save_frozen(mut self, save: bool) -> Self {
        self.program.leaves_frozen = !save;
        self
    }

    /// Sets a DeepSpeed configuration, in the place of the file that the environment names.
    #[must_use]
    pub fn deepspeed(mut self, config: DeepSpeedConfig) -> Self {
        self.program.deepspeed = Some(config);
        self
    }

    /// Shards training state as PyTorch FSDP does. What the options leave open is the environment's to say
    /// (`FSDP_*`, where `ACCELERATE_USE_FSDP` is true), else it has FSDP's default.
    #[must_use]
    pub fn fully_sharded(mut self, options: FullyShardedOptions) -> Self {
        self.program.fully_sharded = Some(options);
        self
    }

    /// Tells the model's width, from which the sizes follow that a DeepSpeed configuration leaves `"auto"`.
    #[must_use]
    pub fn hidden_size(mut self, size: u64) -> Self {
        self.program.hidden_size = Some(size);
        self
    }

    /// Sets how long a collective waits for its peers; 30 minutes by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets what this rank computes on; by default what the environment asks for, else the CPU.
    ///
    /// On a GPU all of the model's computations and state are there, but for what is offloaded to the host's memory, where the
    /// CPU updates it. This has not been run on a GPU yet.
    #[must_use]
    pub fn device(mut self, device: DeviceRequest) -> Self {
        self.device = Some(device);
        self
    }

    /// Uses a group of ranks that exists already, for ranks as threads and for other launchers.
    #[must_use]
    pub fn communicator(mut self, communicator: std::sync::Arc<dyn sconce_collectives::Communicator>) -> Self {
        let world = World {
            rank: communicator.rank(),
            size: communicator.size(),
            local_rank: communicator.rank(),
            local_size: communicator.size(),
            ..World::single()
        };
        self.connection = Some((world, communicator));
        self
    }

    /// Does what [`communicator`](Self::communicator) does, for ranks of which it is known on which hosts they are.
    #[must_use]
    pub fn communicator_of(
        mut self,
        world: World,
        communicator: std::sync::Arc<dyn sconce_collectives::Communicator>,
    ) -> Self {
        self.connection = Some((world, communicator));
        self
    }

    /// Joins the other ranks and makes the accelerator.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) for a setting that cannot be used,
    /// [`Error::DeepSpeed`](crate::Error::DeepSpeed) and [`Error::Contradictions`](crate::Error::Contradictions) for a
    /// configuration file; [`Error::FullySharded`](crate::Error::FullySharded) and
    /// [`Error::Exclusive`](crate::Error::Exclusive) for FSDP; [`Error::Device`](crate::Error::Device); errors of the world and of the group.
    pub fn build(self) -> Result<Box<dyn Accelerator>> {
        self.build_with(sconce_collectives::environment::of_process)
    }

    /// Does what [`AcceleratorBuilder::build`] does with an environment given as a function from name to value.
    ///
    /// # Errors
    /// As [`AcceleratorBuilder::build`].
    pub fn build_with(self, lookup: impl Fn(&str) -> Option<String>) -> Result<Box<dyn Accelerator>> {
        let world = match &self.connection {
            Some((world, _)) => world.clone(),
            None => World::from_lookup(&lookup)?,
        };
        let settings = self.settings(world.size, &lookup)?.on_hosts(&world)?;
        let environment = Environment { lookup: &lookup };
        let seconds = environment.above_zero(variable::SCONCE_TIMEOUT)?;
        let timeout = self.timeout.or(seconds.map(Duration::from_secs));
        // Before ranks wait for one that has no device.
        let request = self.device.map_or_else(|| DeviceRequest::from_lookup(&lookup), Ok)?;
        if settings.fp8.is_some() && !matches!(request, DeviceRequest::Cpu) {
            return Err(Error::Setting {
                setting: "mixed_precision",
                value: "fp8".into(),
                expected: "fp8 is emulated on the CPU only in this version; use bf16 on a GPU".into(),
            });
        }
        let device = request.open(&world)?;
        let folder = lookup(variable::SCONCE_FLIGHT_RECORDER).map_or_else(std::env::temp_dir, PathBuf::from);
        let options = Options {
            timeout: timeout.unwrap_or(Options::default().timeout),
            flight_recorder: Some(folder),
            gpu: request.gpu(&world),
        };
        let (communicator, connection) = match self.connection {
            Some((_, communicator)) => (communicator, None),
            None => {
                let connection = connect(&world, &options)?;
                (std::sync::Arc::clone(&connection.communicator), Some(connection))
            }
        };
        let lock = match &settings.checkpoints {
            // Hours of training should not end with the first save.
            Some(checkpoints) => Keepers::new(&world, settings.saves_on_each_node).run(&*communicator, || {
                crate::checkpoint::check_writable(&checkpoints.folder)?;
                FolderLock::take(&checkpoints.folder)
            })?,
            None => None,
        };
        if world.is_main() {
            tell(&settings, &device);
        }
        let options = EngineOptions {
            frozen: self.frozen,
            ..settings.engine_options(self.strategy, &world)?
        };
        let engine = Engine::new(communicator, options)?;
        let seed = self.seed.unwrap_or(0);
        let accelerator = ManagedAccelerator::new(world, connection, engine, device, seed, settings);
        if let Some(lock) = lock {
            accelerator.registry().keep(lock);
        }
        Ok(Box::new(accelerator))
    }

    /// Returns what a run on `world_size` ranks would be in an environment; joins nobody and makes nothing.
    ///
    /// # Errors
    /// As [`AcceleratorBuilder::build`], but for those of world and group.
    pub fn settings(&self, world_size: usize, lookup: impl Fn(&str) -> Option<String>) -> Result<RunSettings> {
        let strategy = self.strategy.as_ref().map(|strategy| strategy.name());
        self.program.resolve(strategy, world_size, &lookup)
    }
}

/// Logs what has no effect, once for all ranks.
fn tell(settings: &RunSettings, device: &Device) {
    if let Some(config) = &settings.deepspeed
        && !config.warnings().is_empty()
    {
        let warnings = Vec::from_iter(config.warnings().iter().map(ToString::to_string));
        tracing::warn!("{}: {}", config.file(), warnings.join("; "));
    }
    for notice in settings.notices(device) {
        tracing::info!("{notice}");
    }
}
