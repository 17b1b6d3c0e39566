//! A plan as a configuration file in Accelerate's form, with comments that say why.

use std::fmt::Write as _;

use sconce_core::environment as variable;
use sconce_core::memory_estimate::{ComputeDevice, MemoryEstimate, ModelShape, RunStrategy, Workload};

use crate::byte_size::ByteSize;
use crate::estimate_memory::{ModelArguments, name_of};
use crate::terminal::shown;

/// What is planned, and what was passed over.
pub(super) struct Plan<'a> {
    pub(super) arguments: &'a ModelArguments,
    pub(super) model: &'a ModelShape,
    pub(super) workload: &'a Workload,
    pub(super) passed_over: &'a [MemoryEstimate],
    pub(super) chosen: &'a MemoryEstimate,
    pub(super) folder: &'a str,
}

/// Keys of the sections, and the variables that say the same to a rank.
const DEEPSPEED: [(&str, &str); 5] = [
    ("zero_stage", variable::ACCELERATE_DEEPSPEED_ZERO_STAGE),
    (
        "offload_optimizer_device",
        variable::ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE,
    ),
    (
        "offload_param_device",
        variable::ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE,
    ),
    (
        "offload_optimizer_nvme_path",
        variable::ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH,
    ),
    (
        "offload_param_nvme_path",
        variable::ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH,
    ),
];
const FSDP: [(&str, &str); 5] = [
    ("fsdp_sharding_strategy", variable::FSDP_SHARDING_STRATEGY),
    ("fsdp_auto_wrap_policy", variable::FSDP_AUTO_WRAP_POLICY),
    ("fsdp_backward_prefetch", variable::FSDP_BACKWARD_PREFETCH),
    ("fsdp_offload_params", variable::FSDP_OFFLOAD_PARAMS),
    ("fsdp_activation_checkpointing", variable::FSDP_ACTIVATION_CHECKPOINTING),
];

impl Plan<'_> {
    /// Returns the file's text.
    pub(super) fn to_yaml(&self) -> String {
        let variables = self.chosen.choice.variables(self.workload, self.folder);
        let value = |name: &str| {
            let found = variables.iter().find(|(of, _)| *of == name);
            found.map(|(_, value)| value.as_str())
        };
        let on_gpu = self.workload.computes_on == ComputeDevice::Cuda;
        let (ranks, machines) = (self.workload.ranks, self.arguments.num_machines);
        let (kind, section, keys): (&str, &str, &[(&str, &str)]) = match self.chosen.choice.strategy {
            RunStrategy::Fsdp(_) => ("FSDP", "fsdp_config", &FSDP),
            RunStrategy::DataParallel if ranks == 1 => ("NO", "", &[]),
            RunStrategy::DataParallel if on_gpu => ("MULTI_GPU", "", &[]),
            RunStrategy::DataParallel => ("MULTI_CPU", "", &[]),
            _ => ("DEEPSPEED", "deepspeed_config", &DEEPSPEED),
        };
        let mut text = self.reasons();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "compute_environment: LOCAL_MACHINE");
        let _ = writeln!(text, "distributed_type: {kind}");
        let _ = writeln!(text, "num_processes: {ranks}");
        let _ = writeln!(text, "num_machines: {machines}");
        let _ = writeln!(text, "use_cpu: {}", !on_gpu);
        let precision = value(variable::ACCELERATE_MIXED_PRECISION).unwrap_or("no");
        let _ = writeln!(text, "mixed_precision: '{precision}'");
        if keys.is_empty() {
            return text;
        }
        let _ = writeln!(text, "{section}:");
        for (key, name) in keys {
            if let Some(value) = value(name) {
                let is_plain = value.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
                let value = match is_plain {
                    true => value.to_owned(),
                    // A double-quoted scalar of YAML's has JSON's escapes.
                    false => serde_json::Value::from(value).to_string(),
                };
                let _ = writeln!(text, "  {key}: {value}");
            }
        }
        text
    }

    /// Returns comments: for what the plan is, what it takes, and why nothing cheaper was taken.
    fn reasons(&self) -> String {
        let (estimate, arguments) = (self.chosen, self.arguments);
        let mut lines = vec![
            format!(
                "By `sconce plan` for {}: {}, {} parameters.",
                shown(&arguments.model.display().to_string()).replace('\n', " "),
                self.model.kind,
                self.model.elements()
            ),
            format!("Chosen: {}, the cheapest that fits.", name_of(&estimate.choice)),
            format!(
                "A rank takes {} at most: parameters {}, masters {}, gradients {}, optimizer {}, buffers {}, gathered {}, \
                 activations {}.",
                ByteSize(estimate.device_peak),
                ByteSize(estimate.parameters),
                ByteSize(estimate.masters),
                ByteSize(estimate.gradients),
                ByteSize(estimate.optimizer),
                ByteSize(estimate.buffers),
                ByteSize(estimate.gathered),
                estimate
                    .activations
                    .map_or_else(|| "not known".to_owned(), |bytes| ByteSize(bytes).to_string()),
            ),
            format!(
                "That is with {} samples{} a forward, and {:?}.",
                self.workload.batch,
                self.model
                    .sequence(self.workload)
                    .map_or_else(String::new, |tokens| format!(" of {tokens} tokens")),
                self.workload.optimizer
            ),
        ];
        let on_host = estimate.of_host(self.workload.computes_on);
        if on_host > 0 {
            lines.push(format!("Each machine holds {} for its ranks.", ByteSize(on_host)));
        }
        if estimate.disk > 0 {
            lines.push(format!(
                "A rank's files have {}; the folder must exist.",
                ByteSize(estimate.disk)
            ));
        }
        for (flag, limit) in [("--memory", arguments.memory), ("--host_memory", arguments.host_memory)] {
            lines.extend(limit.map(|limit| format!("{flag} is {limit}.")));
        }
        let passed_over = self.passed_over.iter().map(|estimate| {
            let peak = ByteSize(estimate.device_peak);
            format!("Does not fit: {}, {peak} a rank.", name_of(&estimate.choice))
        });
        lines.extend(passed_over);
        lines.into_iter().map(|line| format!("# {line}\n")).collect()
    }
}
