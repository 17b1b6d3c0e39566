//! The sections `zero_optimization` and `aio`.

use super::Setting;
use super::error::ConfigError;
use super::json::Node;
use super::precision::is_true;
use super::section::{AutoRule, FromNode, Section};

/// How state is partitioned. Sizes are counts of elements, not bytes.
#[derive(Debug, Clone, PartialEq)]
pub struct ZeroOptimization {
    /// The stage, 0 to 3.
    pub stage: Setting<u64>,
    /// Reduces each gradient to its owner only, instead of to every rank.
    pub reduce_scatter: bool,
    /// Gradient elements reduced at once.
    pub reduce_bucket_size: Setting<u64>,
    /// Parameter elements gathered at once, in stages 1 and 2.
    pub allgather_bucket_size: u64,
    /// Communicates during the backward pass; absent means in stage 3 only.
    pub overlap_comm: Option<bool>,
    /// Takes master weights from a checkpoint as they are, instead of from its 16-bit weights.
    pub load_from_fp32_weights: bool,
    /// Allows parameters that get no gradient.
    pub ignore_unused_parameters: bool,
    /// Elements that the optimizer updates at once, in stage 3.
    pub sub_group_size: u64,
    /// Elements gathered ahead, in stage 3.
    pub prefetch_bucket_size: Setting<u64>,
    /// Parameters up to this size are never partitioned, in stage 3.
    pub param_persistence_threshold: Setting<u64>,
    /// The most elements that are not partitioned for that reason.
    pub model_persistence_threshold: u64,
    /// The most elements gathered at once, in stage 3.
    pub max_live_parameters: u64,
    /// A parameter needed again within this many elements stays gathered.
    pub max_reuse_distance: u64,
    /// Gathers the whole weights when the model is saved, in stage 3.
    pub gather_16bit_weights_on_model_save: Setting<bool>,
    /// Ranks of a second, smaller partition, in stage 3; 1 means none.
    pub hpz_partition_size: u64,
    /// Where partitioned parameters lie, in stage 3.
    pub offload_param: OffloadParameters,
    /// Where optimizer state lies.
    pub offload_optimizer: OffloadOptimizer,
}

/// Where state lies when it is not in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OffloadDevice {
    /// Where the model is.
    None,
    /// In main memory.
    Cpu,
    /// In files.
    Nvme,
}

impl std::fmt::Display for OffloadDevice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::None => "none",
            Self::Cpu => "cpu",
            Self::Nvme => "nvme",
        })
    }
}

/// The section `offload_param`.
#[derive(Debug, Clone, PartialEq)]
pub struct OffloadParameters {
    /// Where parameters lie.
    pub device: Setting<OffloadDevice>,
    /// The folder, for NVMe.
    pub nvme_path: Option<String>,
    /// Buffers for moving them.
    pub buffer_count: u64,
    /// Elements of a buffer.
    pub buffer_size: u64,
    /// Elements kept in main memory, for NVMe.
    pub max_in_cpu: u64,
    /// Uses page-locked memory.
    pub pin_memory: bool,
}

/// The section `offload_optimizer`.
#[derive(Debug, Clone, PartialEq)]
pub struct OffloadOptimizer {
    /// Where optimizer state lies.
    pub device: Setting<OffloadDevice>,
    /// The folder, for NVMe.
    pub nvme_path: Option<String>,
    /// Buffers for moving it.
    pub buffer_count: u64,
    /// Uses page-locked memory.
    pub pin_memory: bool,
    /// Reads the next part while one is updated.
    pub pipeline_read: bool,
    /// Writes the last part while one is updated.
    pub pipeline_write: bool,
    /// The share of the state that is moved, 0 to 1; below 1 in stage 3 only.
    pub ratio: f64,
}

/// The section `aio`: reading and writing of files for NVMe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AsynchronousIo {
    /// Bytes of one request.
    pub block_size: u64,
    /// Requests under way at once.
    pub queue_depth: u64,
    /// Threads of one transfer.
    pub intra_op_parallelism: u64,
    /// Submits requests one by one.
    pub single_submit: bool,
    /// Waits for some requests at a time, not for all.
    pub overlap_events: bool,
}

/// DeepSpeed's default of `stage3_prefetch_bucket_size`.
pub(super) const PREFETCH_BUCKET_SIZE: u64 = 50_000_000;
/// DeepSpeed's default of `stage3_param_persistence_threshold`.
pub(super) const PARAM_PERSISTENCE_THRESHOLD: u64 = 100_000;

const QUANTIZED: &str = "it changes what is communicated; remove it";

impl ZeroOptimization {
    pub(super) fn read(top: &mut Section<'_>) -> Result<Self, ConfigError> {
        let empty = Node::Object(Vec::new());
        let mut section = match top.child("zero_optimization", AutoRule::MeansDefault)? {
            Some(section) => section,
            None => top.absent("zero_optimization", &empty)?,
        };
        let zero = Self {
            stage: section.setting("stage", 0)?,
            reduce_scatter: section.value("reduce_scatter", true)?,
            reduce_bucket_size: section.setting("reduce_bucket_size", 500_000_000)?,
            allgather_bucket_size: section.value("allgather_bucket_size", 500_000_000)?,
            overlap_comm: section.optional("overlap_comm")?,
            load_from_fp32_weights: section.value("load_from_fp32_weights", true)?,
            ignore_unused_parameters: section.value("ignore_unused_parameters", true)?,
            sub_group_size: section.value("sub_group_size", 1_000_000_000)?,
            prefetch_bucket_size: section.setting("stage3_prefetch_bucket_size", PREFETCH_BUCKET_SIZE)?,
            param_persistence_threshold: section
                .setting("stage3_param_persistence_threshold", PARAM_PERSISTENCE_THRESHOLD)?,
            model_persistence_threshold: section.value("stage3_model_persistence_threshold", i64::MAX as u64)?,
            max_live_parameters: section.value("stage3_max_live_parameters", 1_000_000_000)?,
            max_reuse_distance: section.value("stage3_max_reuse_distance", 1_000_000_000)?,
            gather_16bit_weights_on_model_save: section.setting("stage3_gather_16bit_weights_on_model_save", false)?,
            hpz_partition_size: section.value("zero_hpz_partition_size", 1)?,
            offload_param: OffloadParameters::read(&mut section)?,
            offload_optimizer: OffloadOptimizer::read(&mut section)?,
        };
        section.no_effect(&[
            "contiguous_gradients",
            "use_multi_rank_bucket_allreduce",
            "allgather_partitions",
            "round_robin_gradients",
            "elastic_checkpoint",
            "legacy_stage1",
            "grad_hooks",
            "cpu_offload_use_pin_memory",
            // Of no version of DeepSpeed, but in files that are passed around.
            "stage3_max_act_zero_gap",
            "stage3_module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
            "mics_hierarchical_params_gather",
            "memory_efficient_linear",
            "pipeline_loading_checkpoint",
            "override_module_apply",
            "log_trace_cache_warnings",
            "enable_sanity_checks",
            "leaf_module",
            "save_muon_momentum_buffer_in_memory",
            "compute_grad_norm",
        ]);
        section.refuse("zero_quantized_weights", is_true, QUANTIZED)?;
        section.refuse("zero_quantized_nontrainable_weights", is_true, QUANTIZED)?;
        section.refuse("zero_quantized_gradients", is_true, QUANTIZED)?;
        section.refuse("zeropp_loco_param", |_| true, QUANTIZED)?;
        let shards = |node: &Node| u64::from_node(node).is_some_and(|size| size > 1);
        section.refuse("mics_shard_size", shards, "set zero_hpz_partition_size, or remove it")?;
        section.refuse("zenflow", |_| true, "remove it")?;
        zero.check(&section)?;
        zero.warn_of_the_idle(&section);
        section.finish()?;
        Ok(zero)
    }

    /// Names the keys that are read and change nothing here, where they ask for something else than the default.
    fn warn_of_the_idle(&self, section: &Section<'_>) {
        section.no_effect_unless("reduce_scatter", &self.reduce_scatter, &true);
        section.no_effect_unless("allgather_bucket_size", &self.allgather_bucket_size, &500_000_000);
        // Reductions always run beside the backward pass.
        section.no_effect_unless("overlap_comm", &self.overlap_comm.unwrap_or(true), &true);
        section.no_effect_unless("load_from_fp32_weights", &self.load_from_fp32_weights, &true);
        section.no_effect_unless(
            "stage3_model_persistence_threshold",
            &self.model_persistence_threshold.min(i64::MAX as u64),
            &(i64::MAX as u64),
        );
        section.no_effect_unless("stage3_max_reuse_distance", &self.max_reuse_distance, &1_000_000_000);
        section.no_effect_unless("zero_hpz_partition_size", &self.hpz_partition_size, &1);
        section.no_effect_unless("offload_param.buffer_count", &self.offload_param.buffer_count, &5);
        section.no_effect_unless(
            "offload_param.buffer_size",
            &self.offload_param.buffer_size,
            &100_000_000,
        );
        section.no_effect_unless(
            "offload_param.max_in_cpu",
            &self.offload_param.max_in_cpu,
            &1_000_000_000,
        );
        section.no_effect_unless(
            "offload_optimizer.buffer_count",
            &self.offload_optimizer.buffer_count,
            &4,
        );
        section.no_effect_unless("offload_optimizer.ratio", &self.offload_optimizer.ratio, &1.0);
    }

    fn check(&self, section: &Section<'_>) -> Result<(), ConfigError> {
        let stage = self.stage.value();
        section.check(stage.is_none_or(|stage| stage <= 3), "stage", "a stage, 0 to 3")?;
        let bucket = self.reduce_bucket_size.value();
        section.check(
            bucket != Some(0),
            "reduce_bucket_size",
            "elements, a whole number above 0",
        )?;
        let even = self.allgather_bucket_size > 0 && self.allgather_bucket_size.is_multiple_of(2);
        section.check(
            even,
            "allgather_bucket_size",
            "elements, a whole number above 0 and a multiple of 2",
        )?;
        section.check(
            self.sub_group_size > 0,
            "sub_group_size",
            "elements, a whole number above 0",
        )?;
        section.check(
            self.hpz_partition_size > 0,
            "zero_hpz_partition_size",
            "ranks, a whole number above 0",
        )?;
        let Some(stage) = stage else { return Ok(()) };
        let third = "stage 3; remove it or change the stage";
        let parameters = self.offload_param.device.value().unwrap_or(OffloadDevice::None);
        section.check(stage == 3 || parameters == OffloadDevice::None, "offload_param", third)?;
        let optimizer = self.offload_optimizer.device.value().unwrap_or(OffloadDevice::None);
        let fits = match optimizer {
            OffloadDevice::None => true,
            OffloadDevice::Cpu => stage >= 1,
            OffloadDevice::Nvme => stage == 3,
        };
        section.check(
            fits,
            "offload_optimizer",
            "stage 1 to 3 with device \"cpu\", stage 3 with \"nvme\"",
        )?;
        let whole = self.offload_optimizer.ratio == 1.0;
        section.check(stage == 3 || whole, "offload_optimizer", "\"ratio\" 1.0, or stage 3")
    }
}

impl OffloadParameters {
    fn read(zero: &mut Section<'_>) -> Result<Self, ConfigError> {
        let mut offload = Self {
            device: Setting::Given(OffloadDevice::None),
            nvme_path: None,
            buffer_count: 5,
            buffer_size: 100_000_000,
            max_in_cpu: 1_000_000_000,
            pin_memory: true,
        };
        let Some(mut section) = zero.child("offload_param", AutoRule::MeansDefault)? else {
            return Ok(offload);
        };
        offload.device = section.setting("device", OffloadDevice::None)?;
        offload.nvme_path = section.optional("nvme_path")?;
        offload.buffer_count = section.value("buffer_count", offload.buffer_count)?;
        offload.buffer_size = section.value("buffer_size", offload.buffer_size)?;
        offload.max_in_cpu = section.value("max_in_cpu", offload.max_in_cpu)?;
        offload.pin_memory = section.value("pin_memory", true)?;
        need_path(&section, offload.device, offload.nvme_path.as_deref())?;
        section.finish()?;
        Ok(offload)
    }
}

impl OffloadOptimizer {
    fn read(zero: &mut Section<'_>) -> Result<Self, ConfigError> {
        let mut offload = Self {
            device: Setting::Given(OffloadDevice::None),
            nvme_path: None,
            buffer_count: 4,
            pin_memory: true,
            pipeline_read: false,
            pipeline_write: false,
            ratio: 1.0,
        };
        let Some(mut section) = zero.child("offload_optimizer", AutoRule::MeansDefault)? else {
            return Ok(offload);
        };
        offload.device = section.setting("device", OffloadDevice::None)?;
        offload.nvme_path = section.optional("nvme_path")?;
        offload.buffer_count = section.value("buffer_count", offload.buffer_count)?;
        offload.pin_memory = section.value("pin_memory", true)?;
        offload.pipeline_read = section.value("pipeline_read", false)?;
        offload.pipeline_write = section.value("pipeline_write", false)?;
        offload.ratio = section.value("ratio", 1.0)?;
        section.check((0.0..=1.0).contains(&offload.ratio), "ratio", "a number from 0 to 1")?;
        section.no_effect(&["fast_init", "cpuadam_cores_perc"]);
        section.refuse("super_offload", is_true, "remove it")?;
        need_path(&section, offload.device, offload.nvme_path.as_deref())?;
        section.finish()?;
        Ok(offload)
    }
}

impl AsynchronousIo {
    pub(super) fn read(top: &mut Section<'_>) -> Result<Self, ConfigError> {
        let mut io = Self {
            block_size: 1 << 20,
            queue_depth: 8,
            intra_op_parallelism: 1,
            single_submit: false,
            overlap_events: true,
        };
        let Some(mut section) = top.child("aio", AutoRule::Refused)? else {
            return Ok(io);
        };
        io.block_size = section.value("block_size", io.block_size)?;
        section.check(io.block_size > 0, "block_size", "bytes, a whole number above 0")?;
        io.queue_depth = section.value("queue_depth", io.queue_depth)?;
        section.check(io.queue_depth > 0, "queue_depth", "a whole number above 0")?;
        io.intra_op_parallelism = section.value("intra_op_parallelism", 1)?;
        section.check(
            io.intra_op_parallelism > 0,
            "intra_op_parallelism",
            "a whole number above 0",
        )?;
        io.single_submit = section.value("single_submit", false)?;
        io.overlap_events = section.value("overlap_events", true)?;
        section.no_effect(&["use_gds"]);
        section.no_effect_unless("block_size", &io.block_size, &(1 << 20));
        section.no_effect_unless("queue_depth", &io.queue_depth, &8);
        section.no_effect_unless("intra_op_parallelism", &io.intra_op_parallelism, &1);
        section.no_effect_unless("single_submit", &io.single_submit, &false);
        section.no_effect_unless("overlap_events", &io.overlap_events, &true);
        section.finish()?;
        Ok(io)
    }
}

impl FromNode for OffloadDevice {
    const EXPECTED: &'static str = "\"none\", \"cpu\" or \"nvme\"";

    fn from_node(node: &Node) -> Option<Self> {
        match String::from_node(node)?.as_str() {
            "none" => Some(Self::None),
            "cpu" => Some(Self::Cpu),
            "nvme" => Some(Self::Nvme),
            _ => None,
        }
    }
}

fn need_path(section: &Section<'_>, device: Setting<OffloadDevice>, path: Option<&str>) -> Result<(), ConfigError> {
    if device == Setting::Given(OffloadDevice::Nvme) && path.is_none_or(str::is_empty) {
        return Err(section.missing("nvme_path", "a folder, because the device is \"nvme\""));
    }
    Ok(())
}
