//! From FSDP's first version to its second, by Accelerate's rules.

use super::{Configuration, ConfigurationError, Origin, Paradigm, Value};
use sconce_fsdp::{FsdpStrategy, Named};

const VERSION: &str = "fsdp_config.fsdp_version";
const STRATEGY: &str = "fsdp_config.fsdp_sharding_strategy";
const RESHARD: &str = "fsdp_config.fsdp_reshard_after_forward";

/// What version 2 does not have.
const DROPPED: [(&str, &str); 4] = [
    (
        "fsdp_config.fsdp_backward_prefetch",
        "version 2 always gathers the next unit ahead",
    ),
    ("fsdp_config.fsdp_forward_prefetch", "version 2 does not have it yet"),
    (
        "fsdp_config.fsdp_sync_module_states",
        "all ranks begin with the same values",
    ),
    ("fsdp_config.fsdp_use_orig_params", "parameters always keep their names"),
];

/// A configuration for FSDP's version 2, and what became of the keys that it does not have.
#[derive(Debug)]
pub struct Converted {
    /// The configuration.
    pub configuration: Configuration,
    /// One line for each key that is gone or means something else.
    pub notes: Vec<String>,
}

impl Configuration {
    /// Converts a configuration for FSDP's version 1; `None` where it is version 2 already.
    ///
    /// # Errors
    /// A configuration that is not for FSDP, and a strategy by two names that are not one.
    pub fn to_fsdp2(&self) -> Result<Option<Converted>, ConfigurationError> {
        let place = |path| {
            let origin = self.get(path).map_or(Origin::Default, |given| given.origin.clone());
            origin.to_string()
        };
        if self.paradigm()? != Paradigm::Fsdp {
            return Err(ConfigurationError::Value {
                place: place("distributed_type"),
                found: "no distributed_type FSDP".into(),
                expected: "a configuration for FSDP".into(),
            });
        }
        let text = |path| self.value(path).and_then(Value::as_text);
        if text(VERSION) == Some("2") {
            return Ok(None);
        }
        let mut configuration = self.clone();
        let mut notes = Vec::new();
        for (path, reason) in DROPPED {
            if configuration.remove(path).is_some() {
                notes.push(format!("{path} is left out: {reason}"));
            }
        }
        // Version 1 has the strategy under either name; true or false, the launcher's default for the second, names none.
        let strategy_of = |path| text(path).and_then(FsdpStrategy::from_name);
        let strategy = match (strategy_of(STRATEGY), strategy_of(RESHARD)) {
            (Some(first), Some(second)) if first != second => {
                return Err(ConfigurationError::Conflict {
                    first: place(STRATEGY),
                    second: place(RESHARD),
                    advice: "they name one strategy, and differ; keep one of them".into(),
                });
            }
            (first, second) => first.or(second).unwrap_or(FsdpStrategy::FullShard),
        };
        configuration.remove(STRATEGY);
        let reshards = strategy.reshards_after_forward();
        notes.push(format!("{STRATEGY} {} becomes {RESHARD} {reshards}", strategy.name()));
        match strategy {
            strategy if strategy.is_hybrid() => notes.push(
                "version 2 shards over all ranks; for groups that each hold all state say so in parallelism_config: \
                 dp_replicate_size groups of dp_shard_size ranks"
                    .into(),
            ),
            FsdpStrategy::NoShard => {
                notes.push("version 2 always shards: gradients and optimizer state are sharded now".into());
            }
            _ => {}
        }
        configuration.set(RESHARD, if reshards { "true" } else { "false" })?;
        configuration.set(VERSION, "2")?;
        Ok(Some(Converted { configuration, notes }))
    }
}
