//! A plan as a configuration file in Accelerate's form, with comments that say why.

use sconce_core::config::{Configuration, ConfigurationError, DISTRIBUTED_TYPE, Format};
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

impl Plan<'_> {
    /// Returns the file's text.
    ///
    /// # Errors
    /// Never for what [`RunChoice::variables`](sconce_core::memory_estimate::RunChoice::variables) gives.
    pub(super) fn to_text(&self, format: Format) -> Result<String, ConfigurationError> {
        let variables = self.chosen.choice.variables(self.workload, self.folder);
        let mut configuration = Configuration::from_environment(|name| {
            let found = variables.iter().find(|(of, _)| *of == name);
            found.map(|(_, value)| value.clone())
        })?;
        let on_gpu = self.workload.computes_on == ComputeDevice::Cuda;
        let kind = match self.chosen.choice.strategy {
            RunStrategy::Fsdp(_) => "FSDP",
            RunStrategy::DataParallel if self.workload.ranks == 1 => "NO",
            RunStrategy::DataParallel if on_gpu => "MULTI_GPU",
            RunStrategy::DataParallel => "MULTI_CPU",
            _ => "DEEPSPEED",
        };
        for (path, value) in [
            ("compute_environment", "LOCAL_MACHINE".to_owned()),
            (DISTRIBUTED_TYPE, kind.to_owned()),
            ("num_processes", self.workload.ranks.to_string()),
            ("num_machines", self.arguments.num_machines.to_string()),
            ("use_cpu", (!on_gpu).to_string()),
        ] {
            configuration.set(path, &value)?;
        }
        let reasons = self.reasons();
        let first = configuration.iter().next().map(|(setting, _)| setting.path);
        Ok(configuration.to_text(format, &|setting| {
            (Some(setting.path) == first).then(|| reasons.clone())
        }))
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
        lines.join("\n")
    }
}
