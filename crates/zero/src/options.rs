//! Settings of an engine.

use crate::{DataParallel, LossScaling, ParameterSet, PowerSgd, ShardingStrategy, UnitPolicy};
use candle_core::DType;
use std::path::PathBuf;

/// Settings of an [`Engine`](crate::Engine).
#[derive(Debug)]
pub struct EngineOptions {
    /// Where state lives.
    pub strategy: Box<dyn ShardingStrategy>,
    /// How many ranks shard together: ranks `0..n`, `n..2n` and so on, each group a replica of the others. `None` is all
    /// ranks. What a strategy does not shard is the same on all ranks, whatever the groups, and its gradients are reduced
    /// over all of them at once.
    pub shard_group: Option<usize>,
    /// Parameters that are not trained: they get no gradient and no optimizer state, but are sharded and saved as others.
    pub frozen: ParameterSet,
    /// Parameters that are f32 whatever dtype the model asks for.
    pub keep_in_f32: ParameterSet,
    /// Which of the parts that the model declares become units; all by default. The parameters of others belong to the
    /// part around them; where there is none, they are whole on every rank.
    pub units: UnitPolicy,
    /// Which of the parts that the model declares compute again in the backward instead of keeping what it needs:
    /// activation checkpointing. None by default; units and others alike.
    pub recompute: UnitPolicy,
    /// How losses are scaled before the backward; `None` takes them as they are.
    pub loss_scaling: Option<LossScaling>,
    /// Skips a step when a gradient of any rank is not finite, also without loss scaling, which always does; by default
    /// such a step spoils the parameters, as in PyTorch. DeepSpeed's `check_grad_overflow` for bf16.
    pub skip_nonfinite: bool,
    /// Allows parameters that get no gradient; they are not updated in a step in which no rank used them.
    pub find_unused_parameters: bool,
    /// Looks for what is not finite, as PyTorch's `detect_anomaly`: a loss that is not is an error, and so is the first
    /// gradient of a backward that is not, by the parameter's name. Where steps with such gradients are skipped, they are only
    /// noted ([`Engine::last_anomaly`](crate::Engine::last_anomaly)) and logged. Costs a pass over the gradients.
    pub detect_anomaly: bool,
    /// Size at which the first gradient bucket is closed, in bytes.
    pub first_bucket_bytes: usize,
    /// Size at which the other gradient buckets are closed, in bytes.
    pub bucket_bytes: usize,
    /// The dtype in which gradients travel between ranks and are summed: f32, bf16 or f16. They are kept in f32 in any case;
    /// in another dtype every sum is rounded once.
    pub reduce_dtype: DType,
    /// Sends thin factors of gradients in place of gradients; for data parallelism only.
    pub power_sgd: Option<PowerSgd>,
    /// Converts floats that go into a unit to the dtype of its first parameter.
    pub cast_inputs: bool,
    /// Converts floats that come out of a unit to this dtype.
    pub output_dtype: Option<DType>,
    /// How sharded parameters are gathered.
    pub gathering: Gathering,
    /// Where state lies whose tier is [`Tier::Disk`](crate::Tier::Disk).
    pub disk: Option<DiskOptions>,
    /// For tests: treats parameters on the CPU as if they were on a device whose memory the engine cannot reach.
    #[doc(hidden)]
    pub emulate_device: bool,
}

impl Default for EngineOptions {
    /// Data parallelism with the bucket sizes of PyTorch DDP: 1 MiB, then 25 MiB.
    fn default() -> Self {
        Self {
            strategy: Box::new(DataParallel),
            shard_group: None,
            frozen: ParameterSet::none(),
            keep_in_f32: ParameterSet::none(),
            units: UnitPolicy::all(),
            recompute: UnitPolicy::none(),
            loss_scaling: None,
            skip_nonfinite: false,
            find_unused_parameters: false,
            detect_anomaly: false,
            first_bucket_bytes: 1 << 20,
            bucket_bytes: 25 << 20,
            reduce_dtype: DType::F32,
            power_sgd: None,
            cast_inputs: false,
            output_dtype: None,
            gathering: Gathering::default(),
            disk: None,
            emulate_device: false,
        }
    }
}

/// How sharded parameters are gathered for the units that compute with them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gathering {
    /// Elements that may be under way ahead of their unit: DeepSpeed's `stage3_prefetch_bucket_size`. 0 gathers a unit
    /// when it runs.
    pub prefetch_elements: usize,
    /// Elements gathered at once, beyond which nothing is gathered ahead: DeepSpeed's `stage3_max_live_parameters`.
    pub max_live_elements: usize,
    /// Units that may be under way ahead: FSDP's is 1.
    pub prefetch_units: usize,
    /// Whether units are gathered ahead of their forward: FSDP's `forward_prefetch`.
    pub forward_prefetch: bool,
    /// When units are gathered ahead of their backward: [`BackwardPrefetch::Pre`] by default.
    pub backward_prefetch: BackwardPrefetch,
    /// Whether a unit's parameters go after its forward, to be gathered again for its backward. Those that stay go after
    /// their unit's backward, and before values change at the latest.
    pub reshard_after_forward: bool,
}

impl Default for Gathering {
    /// DeepSpeed's defaults.
    fn default() -> Self {
        Self {
            prefetch_elements: 50_000_000,
            max_live_elements: 1_000_000_000,
            prefetch_units: usize::MAX,
            forward_prefetch: true,
            backward_prefetch: BackwardPrefetch::Pre,
            reshard_after_forward: true,
        }
    }
}

/// When the unit whose backward comes next is gathered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum BackwardPrefetch {
    /// Before the gradients of the unit at hand are computed: most overlap, one unit more in memory.
    Pre,
    /// After them.
    Post,
    /// When it runs.
    #[default]
    None,
}

/// State on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskOptions {
    /// An existing folder; each rank makes its own files in it and removes them at the end.
    pub folder: PathBuf,
    /// Most parameters whose optimizer state is in memory at once, as one piece: DeepSpeed's `sub_group_size`. Three
    /// pieces are under way: one is read, one updated, one written.
    pub sub_group_elements: usize,
}
