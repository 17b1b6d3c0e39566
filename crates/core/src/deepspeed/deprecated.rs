//! Old names and forms, turned into the present ones as DeepSpeed turns them, before anything is read.

use super::Warning;
use super::error::ConfigError;
use super::json::Node;
use super::section::Source;

/// The bare names that DeepSpeed accepts beside those with `stage3_` in front.
const ALIASES: [&str; 9] = [
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
];

/// Rewrites the tree; says so in warnings.
pub(super) fn modernise(tree: &mut Node, source: &Source) -> Result<(), ConfigError> {
    rename(tree, "", "bfloat16", "bf16", source, Notice::Silent)?;
    zero_as_flag(tree, source);
    if let Some(zero) = tree.at_mut("zero_optimization") {
        for bare in ALIASES {
            rename(
                zero,
                "zero_optimization",
                bare,
                &format!("stage3_{bare}"),
                source,
                Notice::Silent,
            )?;
        }
        let old = "stage3_gather_fp16_weights_on_model_save";
        let new = "stage3_gather_16bit_weights_on_model_save";
        rename(zero, "zero_optimization", old, new, source, Notice::Warning)?;
        for (old, new) in [
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_params", "offload_param"),
            ("cpu_offload_param", "offload_param"),
        ] {
            offload_as_flag(zero, old, new, source)?;
        }
        offload_as_of_launchers(zero, source)?;
    }
    if let Some(aio) = tree.at_mut("aio") {
        rename(
            aio,
            "aio",
            "thread_count",
            "intra_op_parallelism",
            source,
            Notice::Warning,
        )?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Notice {
    Silent,
    Warning,
}

/// `zero_optimization: true` means stage 1, with the bucket size of a key at top level.
fn zero_as_flag(tree: &mut Node, source: &Source) {
    let Some(Node::Flag(on)) = tree.get("zero_optimization") else {
        return;
    };
    let stage = u64::from(*on);
    let mut section = Node::Object(vec![("stage".into(), Node::Number(stage.into()))]);
    if let Some(size) = tree.remove("allgather_size").filter(|_| stage == 1) {
        section.set("allgather_bucket_size", size);
    }
    source.warn(Warning::Deprecated {
        path: "zero_optimization".into(),
        read_as: section.to_string(),
    });
    tree.set("zero_optimization", section);
}

fn offload_as_flag(zero: &mut Node, old: &str, new: &str, source: &Source) -> Result<(), ConfigError> {
    if !matches!(zero.get(old), Some(Node::Flag(_))) {
        return Ok(());
    }
    let on = zero.remove(old) == Some(Node::Flag(true));
    if zero.get(new).is_some() {
        return Err(both(source, "zero_optimization", old, new));
    }
    let section = Node::Object(vec![(
        "device".into(),
        Node::Text(if on { "cpu" } else { "none" }.into()),
    )]);
    source.warn(Warning::Deprecated {
        path: format!("zero_optimization.{old}"),
        read_as: format!("\"{new}\": {section}"),
    });
    if on {
        zero.set(new, section);
    }
    Ok(())
}

/// Names of launchers' flags, which files have in this place although DeepSpeed refuses them there: a device, and whether
/// the optimizer is offloaded to the CPU.
fn offload_as_of_launchers(zero: &mut Node, source: &Source) -> Result<(), ConfigError> {
    for (old, new) in [
        ("offload_optimizer_params", "offload_optimizer"),
        ("offload_optimizer_device", "offload_optimizer"),
        ("offload_param_device", "offload_param"),
    ] {
        let device = match zero.get(old) {
            Some(Node::Flag(on)) if old == "offload_optimizer_params" => {
                Node::Text(if *on { "cpu" } else { "none" }.into())
            }
            Some(device @ Node::Text(_)) => device.clone(),
            _ => continue,
        };
        zero.remove(old);
        if zero.get(new).is_some() {
            return Err(both(source, "zero_optimization", old, new));
        }
        let section = Node::Object(vec![("device".into(), device)]);
        source.warn(Warning::Deprecated {
            path: format!("zero_optimization.{old}"),
            read_as: format!("\"{new}\": {section}"),
        });
        zero.set(new, section);
    }
    Ok(())
}

fn rename(
    section: &mut Node,
    path: &str,
    old: &str,
    new: &str,
    source: &Source,
    notice: Notice,
) -> Result<(), ConfigError> {
    let Some(value) = section.remove(old) else {
        return Ok(());
    };
    if section.get(new).is_some() {
        return Err(both(source, path, old, new));
    }
    section.set(new, value);
    if notice == Notice::Warning {
        source.warn(Warning::Deprecated {
            path: join(path, old),
            read_as: format!("`{new}`"),
        });
    }
    Ok(())
}

fn both(source: &Source, path: &str, old: &str, new: &str) -> ConfigError {
    ConfigError::Conflict {
        place: source.place(join(path, old)),
        other: join(path, new),
        advice: "they are two names of one setting; keep the second".into(),
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() {
        key.into()
    } else {
        format!("{path}.{key}")
    }
}
