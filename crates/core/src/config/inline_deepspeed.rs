//! A DeepSpeed configuration inside of a configuration file, or in its place.

use super::foreign_keys::foreign_key;
use super::settings::setting;
use super::{Configuration, ConfigurationError, Place, Value, Warning};
use crate::deepspeed::{DeepSpeedConfig, Node, Validation};

/// Keys that only a DeepSpeed configuration has at its top.
const OF_DEEPSPEED: [&str; 9] = [
    "zero_optimization",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "optimizer",
    "scheduler",
    "bf16",
    "bfloat16",
    "steps_per_print",
    "zero_allow_untested_optimizer",
];
/// Keys that only Accelerate's files have at their top.
const OF_ACCELERATE: [&str; 4] = [
    "compute_environment",
    "distributed_type",
    "deepspeed_config",
    "fsdp_config",
];

type Entries = [(String, Node)];

/// Says whether a file's top level is that of a DeepSpeed configuration.
pub(super) fn is_whole_file(entries: &Entries) -> bool {
    has(entries, &OF_DEEPSPEED) && !has(entries, &OF_ACCELERATE)
}

/// Says whether a value is given to one of these keys. A null says nothing, and is not written again.
fn has(entries: &Entries, keys: &[&str]) -> bool {
    let given = |(key, value): &(String, Node)| *value != Node::Null && keys.contains(&key.as_str());
    entries.iter().any(given)
}

/// Takes the keys of Accelerate's out of a section that has DeepSpeed's: first DeepSpeed's, if there are any, then the
/// others. What both know (`gradient_clipping`) is DeepSpeed's then, whose file decides.
pub(super) fn split(entries: &Entries) -> (Option<Node>, Vec<(String, Node)>) {
    if !has(entries, &OF_DEEPSPEED) {
        return (None, entries.to_vec());
    }
    let shared = ["gradient_clipping", "gradient_accumulation_steps"];
    let is_accelerates = |key: &str| {
        let path = format!("deepspeed_config.{key}");
        !shared.contains(&key) && (setting(&path).is_some() || foreign_key(&path).is_some())
    };
    let given = entries.iter().filter(|(_, value)| *value != Node::Null).cloned();
    let (others, inline): (Vec<_>, Vec<_>) = given.partition(|(key, _)| is_accelerates(key));
    (Some(Node::Object(inline)), others)
}

/// Reads the configuration once, so that what is wrong in it is told now, and passes on its warnings.
pub(super) fn value(tree: &Node, place: &Place, into: &mut Configuration) -> Result<Value, ConfigurationError> {
    let json = tree.to_json().to_string();
    let config = DeepSpeedConfig::parse(&json, &place.to_string(), Validation::Lenient)?;
    for warning in config.warnings() {
        into.warn(Warning::new(place, warning.to_string()));
    }
    Ok(Value::DeepSpeed(json))
}
