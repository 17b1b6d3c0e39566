//! What stands for `"auto"`, as Hugging Face's accelerate and transformers fill it.

use super::OffloadDevice;
use super::error::ConfigError;
use super::json::Node;
use serde_json::Number;

/// What the program knows; what is `None` is not known.
///
/// A value that the file gives and the program gives differently is an error, as there: one message lists them all.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AutoValues {
    /// Data-parallel ranks, for the batch of one step.
    pub data_parallel_size: Option<u64>,
    /// Samples of one forward on one rank: the data loader's batch size.
    pub micro_batch_size_per_rank: Option<u64>,
    /// Forwards of one optimizer step; 1 stands for `"auto"` when it is not known.
    pub gradient_accumulation_steps: Option<u64>,
    /// The greatest gradient norm; 1.0 stands for `"auto"` when it is not known.
    pub gradient_clipping: Option<f64>,
    /// The precision; none but f32 stands for `"auto"` when it is not known.
    pub mixed_precision: Option<MixedPrecision>,
    /// The optimizer's learning rate, also the highest of a warm-up.
    pub learning_rate: Option<f64>,
    /// The decays of the optimizer's moments.
    pub betas: Option<(f64, f64)>,
    /// The optimizer's epsilon.
    pub epsilon: Option<f64>,
    /// The optimizer's weight decay.
    pub weight_decay: Option<f64>,
    /// Optimizer steps of the warm-up.
    pub warmup_steps: Option<u64>,
    /// Optimizer steps of the run. No multiple by the number of ranks: our schedules count optimizer steps.
    pub total_steps: Option<u64>,
    /// The model's width (the widest, of several), for the bucket sizes of ZeRO. When it is not known, 25 MiB of f32
    /// stand for `"auto"` in `reduce_bucket_size`, and DeepSpeed's defaults in the two sizes of stage 3.
    pub hidden_size: Option<u64>,
    /// The stage of ZeRO; 2 stands for `"auto"` when it is not known.
    pub zero_stage: Option<u64>,
    /// Where optimizer state lies.
    pub offload_optimizer_device: Option<OffloadDevice>,
    /// Where parameters lie.
    pub offload_param_device: Option<OffloadDevice>,
    /// Whether whole weights are gathered when the model is saved; no stands for `"auto"` when it is not known.
    pub gather_weights_on_save: Option<bool>,
}

/// The precision of training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MixedPrecision {
    /// f32 throughout.
    No,
    /// f16 with a scaled loss.
    Fp16,
    /// bf16.
    Bf16,
    /// bf16 with products of linear layers in fp8; see [`fp8`](crate::fp8).
    Fp8,
}

impl MixedPrecision {
    /// Returns the precision of everything but products in fp8.
    pub fn base(self) -> Self {
        match self {
            Self::Fp8 => Self::Bf16,
            other => other,
        }
    }
}

impl std::fmt::Display for MixedPrecision {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::No => "no",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        })
    }
}

/// What becomes of an `"auto"` for which nothing stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unfilled {
    /// It is an error.
    Refused,
    /// It stays.
    Kept,
}

/// Elements of a gradient bucket for `"auto"`: 25 MiB of f32, as in PyTorch's DDP.
const BUCKET_ELEMENTS: u64 = (25 << 20) / 4;

struct Row {
    path: &'static str,
    value: Option<Node>,
    /// What stands for `"auto"` when the program does not know.
    otherwise: Option<Node>,
    /// Whether a value in the file must equal the program's.
    must_match: bool,
}

impl AutoValues {
    /// Puts values where the tree says `"auto"`.
    pub(super) fn fill(&self, tree: &mut Node, file: &str, rest: Unfilled) -> Result<(), ConfigError> {
        let (mut mismatches, mut unfilled) = (Vec::new(), Vec::new());
        for row in self.rows(tree) {
            let Some(place) = tree.at_mut(row.path) else { continue };
            if place.is_auto() {
                match row.value.or(row.otherwise) {
                    Some(value) => *place = value,
                    None => unfilled.push(row.path.to_owned()),
                }
            } else if let Some(value) = row.value
                && row.must_match
                && !same(place, &value)
            {
                mismatches.push(format!(
                    "`{}` is {place} in the file and {value} in the program",
                    row.path
                ));
            }
        }
        let file = file.to_owned();
        if !mismatches.is_empty() {
            return Err(ConfigError::Mismatches { file, list: mismatches });
        }
        if !unfilled.is_empty() && rest == Unfilled::Refused {
            return Err(ConfigError::StillAuto { file, paths: unfilled });
        }
        Ok(())
    }

    fn rows(&self, tree: &Node) -> Vec<Row> {
        let micro = self
            .micro_batch_size_per_rank
            .or(given_whole(tree, "train_micro_batch_size_per_gpu"));
        let steps = self
            .gradient_accumulation_steps
            .or(given_whole(tree, "gradient_accumulation_steps"));
        let train = micro
            .zip(self.data_parallel_size)
            .map(|(micro, ranks)| micro.saturating_mul(steps.unwrap_or(1)).saturating_mul(ranks));
        let precision = |wanted| {
            self.mixed_precision
                .map(|precision| Node::Flag(precision.base() == wanted))
        };
        let rate_in_file = tree.at("optimizer.params.lr").filter(|rate| !rate.is_auto()).cloned();
        let width = |size: fn(u64) -> u64| self.hidden_size.map(size).map(whole);
        let row = |path, value| Row {
            path,
            value,
            otherwise: None,
            must_match: true,
        };
        let or = |path, value, otherwise| Row {
            otherwise: Some(otherwise),
            ..row(path, value)
        };
        let fill_or = |path, value, otherwise| Row {
            must_match: false,
            ..or(path, value, otherwise)
        };
        vec![
            row(
                "train_micro_batch_size_per_gpu",
                self.micro_batch_size_per_rank.map(whole),
            ),
            or(
                "gradient_accumulation_steps",
                self.gradient_accumulation_steps.map(whole),
                whole(1),
            ),
            row("train_batch_size", train.map(whole)),
            or("gradient_clipping", self.gradient_clipping.and_then(real), whole(1)),
            or("fp16.enabled", precision(MixedPrecision::Fp16), Node::Flag(false)),
            or("bf16.enabled", precision(MixedPrecision::Bf16), Node::Flag(false)),
            row("optimizer.params.lr", self.learning_rate.and_then(real)),
            row("optimizer.params.betas", self.betas.and_then(pair)),
            row("optimizer.params.eps", self.epsilon.and_then(real)),
            row("optimizer.params.weight_decay", self.weight_decay.and_then(real)),
            fill_or("scheduler.params.warmup_min_lr", None, whole(0)),
            Row {
                otherwise: rate_in_file,
                ..row("scheduler.params.warmup_max_lr", self.learning_rate.and_then(real))
            },
            row("scheduler.params.warmup_num_steps", self.warmup_steps.map(whole)),
            row("scheduler.params.total_num_steps", self.total_steps.map(whole)),
            or("zero_optimization.stage", self.zero_stage.map(whole), whole(2)),
            fill_or(
                "zero_optimization.reduce_bucket_size",
                width(|size| size.saturating_mul(size)),
                whole(BUCKET_ELEMENTS),
            ),
            fill_or(
                "zero_optimization.stage3_prefetch_bucket_size",
                width(|size| {
                    (u128::from(size) * u128::from(size) * 9 / 10)
                        .try_into()
                        .unwrap_or(u64::MAX)
                }),
                whole(super::zero_optimization::PREFETCH_BUCKET_SIZE),
            ),
            fill_or(
                "zero_optimization.stage3_param_persistence_threshold",
                width(|size| size.saturating_mul(10)),
                whole(super::zero_optimization::PARAM_PERSISTENCE_THRESHOLD),
            ),
            or(
                "zero_optimization.stage3_gather_16bit_weights_on_model_save",
                self.gather_weights_on_save.map(Node::Flag),
                Node::Flag(false),
            ),
            or(
                "zero_optimization.offload_optimizer.device",
                self.offload_optimizer_device.map(device),
                text("none"),
            ),
            or(
                "zero_optimization.offload_param.device",
                self.offload_param_device.map(device),
                text("none"),
            ),
        ]
    }
}

fn given_whole(tree: &Node, path: &str) -> Option<u64> {
    match tree.at(path)? {
        Node::Number(number) => number.as_u64(),
        _ => None,
    }
}

/// Compares values, 1 and 1.0 being equal.
fn same(left: &Node, right: &Node) -> bool {
    match (left, right) {
        (Node::Number(left), Node::Number(right)) => left.as_f64() == right.as_f64(),
        (Node::List(left), Node::List(right)) => {
            left.len() == right.len() && left.iter().zip(right).all(|(left, right)| same(left, right))
        }
        _ => left == right,
    }
}

fn whole(value: u64) -> Node {
    Node::Number(value.into())
}

/// JSON has no infinity: such a value is as good as not known.
fn real(value: f64) -> Option<Node> {
    Number::from_f64(value).map(Node::Number)
}

fn pair((first, second): (f64, f64)) -> Option<Node> {
    Some(Node::List(vec![real(first)?, real(second)?]))
}

fn device(device: OffloadDevice) -> Node {
    text(&device.to_string())
}

fn text(value: &str) -> Node {
    Node::Text(value.into())
}
