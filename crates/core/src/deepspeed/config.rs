//! The whole file.

use super::auto_values::{AutoValues, Unfilled};
use super::batch_sizes::{BatchSizes, GivenSizes};
use super::encoded::decoded;
use super::error::{ConfigError, Place};
use super::json::{Node, parse};
use super::precision::is_true;
use super::section::{FromNode, Section, Source};
use super::{
    AsynchronousIo, Bf16, Fp16, Monitors, OptimizerSection, SchedulerSection, Setting, Warning, ZeroOptimization,
    deprecated,
};
use crate::settings::BatchPlan;
use crate::text_file::{Unread, read_text};
use std::cell::RefCell;
use std::path::Path;

/// The most bytes that are read of a file.
const LARGEST: u64 = 1 << 20;

/// How strictly a file is read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Validation {
    /// A repeated key is a warning, and its last value is in force.
    #[default]
    Lenient,
    /// A repeated key is an error.
    Strict,
}

/// A DeepSpeed configuration.
#[derive(Debug, Clone)]
pub struct DeepSpeedConfig {
    file: String,
    tree: Node,
    warnings: Vec<Warning>,
    /// Samples of one optimizer step, over all ranks; see [`Self::batch_sizes`].
    pub train_batch_size: Option<Setting<u64>>,
    /// Samples of one forward on one rank.
    pub train_micro_batch_size_per_gpu: Option<Setting<u64>>,
    /// Forwards of one optimizer step.
    pub gradient_accumulation_steps: Option<Setting<u64>>,
    /// The greatest norm of all gradients; 0 turns clipping off.
    pub gradient_clipping: Setting<f64>,
    /// Divides gradients before they are summed over ranks.
    pub prescale_gradients: bool,
    /// What gradients are divided by before the sum; the rest of the division comes after it.
    pub gradient_predivide_factor: f64,
    /// How gradients of several ranks become one.
    pub gradient_allreduce_op: GradientReduction,
    /// The type in which gradients travel and are summed; absent is f32 here, in DeepSpeed that of the training.
    pub communication_data_type: Option<DataType>,
    /// The type in which gradients of several forwards add up: `data_types.grad_accum_dtype`.
    pub gradient_accumulation_data_type: Option<DataType>,
    /// Drops a last batch that is not full.
    pub dataloader_drop_last: bool,
    /// Steps between two lines of progress.
    pub steps_per_print: Option<u64>,
    /// Times the parts of a step.
    pub wall_clock_breakdown: bool,
    /// The section `zero_optimization`.
    pub zero_optimization: ZeroOptimization,
    /// The section `fp16`.
    pub fp16: Fp16,
    /// The section `bf16`.
    pub bf16: Bf16,
    /// The section `optimizer`.
    pub optimizer: Option<OptimizerSection>,
    /// The section `scheduler`.
    pub scheduler: Option<SchedulerSection>,
    /// The section `aio`.
    pub aio: AsynchronousIo,
    /// The sections of the monitors.
    pub monitors: Monitors,
}

/// How gradients of several ranks become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientReduction {
    /// Their mean.
    Mean,
    /// Their sum.
    Sum,
}

/// The type of the elements of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    /// f32.
    Fp32,
    /// f16.
    Fp16,
    /// bf16.
    Bf16,
}

impl DeepSpeedConfig {
    /// Reads a file.
    ///
    /// # Errors
    /// A file that cannot be read, is larger than 1 MiB, or whose text [`Self::parse`] refuses.
    pub fn read(file: &Path, validation: Validation) -> Result<Self, ConfigError> {
        let name = file.display().to_string();
        let text = read_text(file, LARGEST).map_err(|unread| {
            let file = name.clone();
            match unread {
                Unread::TooLarge => ConfigError::TooLarge { file, limit: LARGEST },
                Unread::Unreadable(source) => ConfigError::Unreadable { file, source },
            }
        })?;
        Self::parse(&text, &name, validation)
    }

    /// Reads the file of a name, or the configuration that stands in the name's place: JSON in base64, as Accelerate reads
    /// it from `ACCELERATE_DEEPSPEED_CONFIG_FILE`.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_or_decode(name: &Path, validation: Validation) -> Result<Self, ConfigError> {
        let in_place = name.to_str().filter(|_| !name.exists()).and_then(decoded);
        match in_place.filter(|text| text.trim_start().starts_with('{')) {
            Some(text) => Self::parse(&text, "DeepSpeed configuration", validation),
            None => Self::read(name, validation),
        }
    }

    /// Reads a text; `file` names it in messages.
    ///
    /// # Errors
    /// A text that is not JSON, unknown keys, unusable values, and features that are not here.
    pub fn parse(text: &str, file: &str, validation: Validation) -> Result<Self, ConfigError> {
        if text.len() as u64 > LARGEST {
            return Err(ConfigError::TooLarge {
                file: file.into(),
                limit: LARGEST,
            });
        }
        let mut warnings = Vec::new();
        let mut tree = parse(text, file, validation, &mut warnings)?;
        let source = Source {
            file: file.into(),
            warnings: RefCell::new(warnings),
        };
        deprecated::modernise(&mut tree, &source)?;
        Self::from_tree(tree, source)
    }

    /// Returns the configuration with the program's values in the places of `"auto"`.
    ///
    /// # Errors
    /// [`ConfigError::Mismatches`] when file and program disagree, [`ConfigError::StillAuto`] when the program does not
    /// know a value, and what [`Self::parse`] refuses in values.
    pub fn fill(&self, values: &AutoValues) -> Result<Self, ConfigError> {
        self.filled(values, Unfilled::Refused)
    }

    /// Does what [`Self::fill`] does as far as the values are known; what nobody knows yet stays `"auto"`.
    ///
    /// # Errors
    /// As [`Self::fill`], but for [`ConfigError::StillAuto`].
    pub fn fill_known(&self, values: &AutoValues) -> Result<Self, ConfigError> {
        self.filled(values, Unfilled::Kept)
    }

    fn filled(&self, values: &AutoValues, rest: Unfilled) -> Result<Self, ConfigError> {
        let mut tree = self.tree.clone();
        values.fill(&mut tree, &self.file, rest)?;
        let source = Source {
            file: self.file.clone(),
            warnings: RefCell::default(),
        };
        let filled = Self::from_tree(tree, source)?;
        Ok(Self {
            warnings: self.warnings.clone(),
            ..filled
        })
    }

    /// Returns the three batch sizes, those that are absent found from the others.
    ///
    /// `data_parallel_size` counts the ranks that read different data.
    ///
    /// # Errors
    /// Sizes that do not fit, none from which to find the others, or `"auto"`.
    pub fn batch_sizes(&self, data_parallel_size: u64) -> Result<BatchSizes, ConfigError> {
        let given = |setting: Option<Setting<u64>>, path| {
            let filled = setting.map(|setting| setting.filled(path)).transpose();
            filled.map_err(|_| ConfigError::StillAuto {
                file: self.file.clone(),
                paths: vec![path.into()],
            })
        };
        let given = GivenSizes {
            train: given(self.train_batch_size, "train_batch_size")?,
            micro_per_rank: given(self.train_micro_batch_size_per_gpu, "train_micro_batch_size_per_gpu")?,
            accumulation_steps: given(self.gradient_accumulation_steps, "gradient_accumulation_steps")?,
        };
        given.solve(data_parallel_size, &self.file)
    }

    /// Returns the batch sizes as far as they are known before the data loader is: its size stands for one that is
    /// absent or `"auto"`. `steps` are the accumulation steps, if the program gives them.
    pub(crate) fn batch_plan(&self, steps: Option<u64>, data_parallel_size: u64) -> Result<BatchPlan, ConfigError> {
        let given = |setting: Option<Setting<u64>>| setting.and_then(Setting::value);
        let given = GivenSizes {
            train: given(self.train_batch_size),
            micro_per_rank: given(self.train_micro_batch_size_per_gpu),
            accumulation_steps: steps.or(given(self.gradient_accumulation_steps)),
        };
        if (given.train, given.micro_per_rank) == (None, None) {
            return Ok(BatchPlan {
                accumulation_steps: given.accumulation_steps.unwrap_or(1),
                micro_per_rank: None,
                train: None,
            });
        }
        let sizes = given.solve(data_parallel_size, &self.file)?;
        Ok(BatchPlan {
            accumulation_steps: sizes.accumulation_steps,
            micro_per_rank: Some(sizes.micro_per_rank),
            train: Some(sizes.train),
        })
    }

    /// Returns the name under which the file was given.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Says whether the file itself gives a value, other than `"auto"`, for the key at a path such as
    /// `zero_optimization.stage`.
    pub fn states(&self, path: &str) -> bool {
        self.stated(path).is_some()
    }

    /// Returns the value that the file itself gives, as JSON.
    pub(crate) fn stated(&self, path: &str) -> Option<String> {
        let value = self.tree.at(path)?;
        (*value != Node::Null && !value.is_auto()).then(|| value.to_string())
    }

    /// Returns a place in the file, for messages.
    pub(crate) fn place(&self, path: &str) -> Place {
        Place {
            file: self.file.clone(),
            path: path.into(),
        }
    }

    /// Returns what a reader should know about the file; print it as one warning.
    pub fn warnings(&self) -> &[Warning] {
        &self.warnings
    }

    /// Names the keys that are read and change nothing here, where they ask for something.
    fn warn_of_the_idle(&self, top: &Section<'_>) {
        top.no_effect_unless("prescale_gradients", &self.prescale_gradients, &false);
        top.no_effect_unless("gradient_predivide_factor", &self.gradient_predivide_factor, &1.0);
        // Gradients add up in f32.
        let is_full = |kind: Option<DataType>| kind.is_none_or(|kind| kind == DataType::Fp32);
        top.no_effect_unless(
            "data_types.grad_accum_dtype",
            &is_full(self.gradient_accumulation_data_type),
            &true,
        );
        // DeepSpeed too drops batches only of loaders that it makes itself.
        top.no_effect_unless("dataloader_drop_last", &self.dataloader_drop_last, &false);
        top.no_effect_unless("steps_per_print", &self.steps_per_print, &None);
        top.no_effect_unless("wall_clock_breakdown", &self.wall_clock_breakdown, &false);
        for (monitor, enabled) in [
            ("tensorboard", self.monitors.tensorboard.enabled),
            ("csv_monitor", self.monitors.csv.enabled),
            ("wandb", self.monitors.wandb.enabled),
        ] {
            top.no_effect_unless(monitor, &enabled, &false);
        }
    }

    fn from_tree(tree: Node, source: Source) -> Result<Self, ConfigError> {
        let mut top = Section::root(&source, &tree)?;
        let gradient_clipping = top.setting("gradient_clipping", 1.0)?;
        let sound = gradient_clipping.value().is_none_or(|norm| norm >= 0.0);
        top.check(sound, "gradient_clipping", "a number from 0; 0 turns clipping off")?;
        let gradient_predivide_factor = top.value("gradient_predivide_factor", 1.0)?;
        top.check(
            gradient_predivide_factor > 0.0,
            "gradient_predivide_factor",
            "a number above 0",
        )?;
        let (fp16, bf16) = (Fp16::read(&mut top)?, Bf16::read(&mut top)?);
        if (fp16.enabled, bf16.enabled) == (Setting::Given(true), Setting::Given(true)) {
            return Err(ConfigError::Conflict {
                place: top.place("fp16.enabled"),
                other: "bf16.enabled".into(),
                advice: "turn one of them off".into(),
            });
        }
        let config = Self {
            file: source.file.clone(),
            train_batch_size: size(&mut top, "train_batch_size")?,
            train_micro_batch_size_per_gpu: size(&mut top, "train_micro_batch_size_per_gpu")?,
            gradient_accumulation_steps: size(&mut top, "gradient_accumulation_steps")?,
            gradient_clipping,
            prescale_gradients: top.value("prescale_gradients", false)?,
            gradient_predivide_factor,
            gradient_allreduce_op: top.value("gradient_allreduce_op", GradientReduction::Mean)?,
            communication_data_type: top.optional("communication_data_type")?,
            gradient_accumulation_data_type: read_data_types(&mut top)?,
            dataloader_drop_last: top.value("dataloader_drop_last", false)?,
            steps_per_print: top.optional("steps_per_print")?,
            wall_clock_breakdown: top.value("wall_clock_breakdown", false)?,
            zero_optimization: ZeroOptimization::read(&mut top)?,
            fp16,
            bf16,
            optimizer: OptimizerSection::read(&mut top)?,
            scheduler: SchedulerSection::read(&mut top)?,
            aio: AsynchronousIo::read(&mut top)?,
            monitors: Monitors::read(&mut top)?,
            tree: Node::Null,
            warnings: Vec::new(),
        };
        config.warn_of_the_idle(&top);
        read_the_rest(&mut top)?;
        top.finish()?;
        Ok(Self {
            tree,
            warnings: source.warnings.into_inner(),
            ..config
        })
    }
}

fn size(top: &mut Section<'_>, key: &'static str) -> Result<Option<Setting<u64>>, ConfigError> {
    let size = top.optional_setting(key)?;
    top.check(
        size != Some(Setting::Given(0)),
        key,
        "a whole number above 0, or \"auto\"",
    )?;
    Ok(size)
}

fn read_data_types(top: &mut Section<'_>) -> Result<Option<DataType>, ConfigError> {
    let Some(mut section) = top.child("data_types", super::section::AutoRule::Refused)? else {
        return Ok(None);
    };
    let accumulation = section.optional("grad_accum_dtype")?;
    section.no_effect(&["param_dtype", "buffer_dtype"]);
    section.finish()?;
    Ok(accumulation)
}

/// Keys that are known and not read: without meaning here, or without support.
fn read_the_rest(top: &mut Section<'_>) -> Result<(), ConfigError> {
    for section in [
        "amp",
        "curriculum_learning",
        "data_efficiency",
        "elasticity",
        "progressive_layer_drop",
        "quantize_training",
        "torch_autocast",
    ] {
        top.refuse(
            section,
            |node| node.get("enabled").is_some_and(is_true),
            "turn it off or remove it",
        )?;
    }
    let several = |node: &Node| u64::from_node(node).is_some_and(|size| size > 1);
    top.refuse("sequence_parallel_size", several, "remove it")?;
    top.refuse(
        "tensor_parallel",
        |node| node.get("autotp_size").is_some_and(several),
        "remove it",
    )?;
    top.no_effect(&[
        "activation_checkpointing",
        "allgather_size",
        "autotuning",
        "checkpoint",
        "comet",
        // Of no version of DeepSpeed, but in files that are passed around.
        "comms_config",
        "comms_logger",
        "compile",
        "compression_training",
        "data_parallel_size",
        "datastates_ckpt",
        "deepspeed_path",
        "disable_allgather",
        "dump_state",
        "eigenvalue",
        "flops_profiler",
        "graph_harvesting",
        "hybrid_engine",
        "log_level",
        "managed_gradient_accumulation",
        "memory_breakdown",
        "nebula",
        "pipeline",
        "seq_parallel_communication_data_type",
        "sparse_attention",
        "sparse_gradients",
        "timers",
        "use_data_before_expert_parallelism",
        "use_node_local_storage",
        "vocabulary_size",
        "weight_quantization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    ]);
    Ok(())
}

impl FromNode for GradientReduction {
    const EXPECTED: &'static str = "\"mean\" or \"sum\"";

    fn from_node(node: &Node) -> Option<Self> {
        match String::from_node(node)?.as_str() {
            "mean" => Some(Self::Mean),
            "sum" => Some(Self::Sum),
            _ => None,
        }
    }
}

impl FromNode for DataType {
    const EXPECTED: &'static str = "\"fp32\", \"fp16\" or \"bf16\"";

    fn from_node(node: &Node) -> Option<Self> {
        match String::from_node(node)?.as_str() {
            "fp32" => Some(Self::Fp32),
            "fp16" => Some(Self::Fp16),
            "bf16" | "bfp16" => Some(Self::Bf16),
            _ => None,
        }
    }
}
