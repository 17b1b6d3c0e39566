//! The estimate as text and as JSON.

use std::fmt::Write as _;
use std::path::Path;

use sconce_core::Tier;
use sconce_core::memory_estimate::{AdamRow, ComputeDevice, MemoryEstimate, ModelShape, RunChoice, Workload};
use serde_json::{Value, json};

use crate::aligned_table::aligned_table;
use crate::byte_size::{ByteSize, as_accelerate_writes};
use crate::terminal::shown;

/// All that is told.
pub(super) struct Answer<'a> {
    pub(super) path: &'a Path,
    pub(super) model: &'a ModelShape,
    pub(super) workload: &'a Workload,
    pub(super) rows: Vec<AdamRow>,
    pub(super) estimates: &'a [MemoryEstimate],
    pub(super) fitting: Option<usize>,
    pub(super) memory: Option<u64>,
    pub(super) host_memory: Option<u64>,
}

/// Returns the name of a choice: the strategy, what is offloaded, what is computed again.
pub(crate) fn name_of(choice: &RunChoice) -> String {
    let mut name = choice.strategy.name().to_owned();
    let place = |tier| match tier {
        Tier::Host => Some("cpu"),
        Tier::Disk => Some("nvme"),
        _ => None,
    };
    for (what, tier) in [("optimizer", choice.optimizer), ("params", choice.parameters)] {
        if let Some(place) = place(tier) {
            let _ = write!(name, ", {what} on {place}");
        }
    }
    if choice.recompute {
        name += ", checkpointing";
    }
    name
}

impl Answer<'_> {
    /// Returns lines and tables for people.
    pub(super) fn text(&self) -> String {
        let (model, workload) = (self.model, self.workload);
        let mut text = format!(
            "{}: {}, {} parameters\n\n",
            shown(&self.path.display().to_string()),
            model.kind,
            model.elements(),
        );
        let row = |row: &AdamRow| {
            vec![
                row.dtype.name().to_owned(),
                as_accelerate_writes(row.largest_layer),
                as_accelerate_writes(row.total),
                row.training.map_or_else(|| "N/A".to_owned(), as_accelerate_writes),
            ]
        };
        let header = ["dtype", "Largest Layer", "Total Size", "Training using Adam"];
        text += &aligned_table(&header, &["dtype"], &Vec::from_iter(self.rows.iter().map(row)));
        let sequence = model
            .sequence(workload)
            .map_or_else(String::new, |tokens| format!(" of {tokens} tokens"));
        let _ = writeln!(
            text,
            "\nEach of {} ranks on the {}, {}, {:?}, {} samples{sequence} a forward, at most:\n",
            workload.ranks,
            device(workload),
            workload.dtype().as_str(),
            workload.optimizer,
            workload.batch,
        );
        text += &self.strategies();
        if self.estimates.iter().any(|estimate| estimate.activations.is_none()) {
            text +=
                "activations are not known: the weights do not tell which layers the model has; give its config.json\n";
        }
        text + &self.recommendation()
    }

    fn strategies(&self) -> String {
        let on_gpu = self.workload.computes_on == ComputeDevice::Cuda;
        let has_disk = self.estimates.iter().any(|estimate| estimate.disk > 0);
        let mut header = vec![
            "strategy",
            "parameters",
            "masters",
            "gradients",
            "optimizer",
            "buffers",
            "gathered",
            "activations",
            "peak",
        ];
        header.extend(on_gpu.then_some("host"));
        header.extend(has_disk.then_some("disk"));
        let size = |bytes| ByteSize(bytes).to_string();
        let row = |(number, estimate): (usize, &MemoryEstimate)| {
            let mark = if self.fitting == Some(number) { "* " } else { "" };
            let mut cells = vec![format!("{mark}{}", name_of(&estimate.choice))];
            let sizes = [
                estimate.parameters,
                estimate.masters,
                estimate.gradients,
                estimate.optimizer,
                estimate.buffers,
                estimate.gathered,
            ];
            cells.extend(sizes.map(size));
            cells.push(estimate.activations.map_or_else(|| "-".to_owned(), size));
            cells.push(size(estimate.device_peak));
            cells.extend(on_gpu.then(|| size(estimate.host)));
            cells.extend(has_disk.then(|| size(estimate.disk)));
            cells
        };
        let rows = Vec::from_iter(self.estimates.iter().enumerate().map(row));
        aligned_table(&header, &["strategy"], &rows)
    }

    fn recommendation(&self) -> String {
        let limits = [("--memory", self.memory), ("--host_memory", self.host_memory)];
        let limits = limits
            .into_iter()
            .filter_map(|(name, limit)| Some(format!("{name} {}", ByteSize(limit?))));
        let limits = limits.collect::<Vec<_>>().join(" and ");
        match self.fitting {
            _ if limits.is_empty() => String::new(),
            Some(number) => {
                let estimate = &self.estimates[number];
                format!(
                    "\nrecommended (*): {}, the cheapest that fits into {limits}; `sconce plan` writes it as a configuration\n",
                    name_of(&estimate.choice)
                )
            }
            None => format!(
                "\nnothing here fits into {limits}; give more ranks, a smaller --batch_size or --sequence_length, or more memory\n"
            ),
        }
    }

    /// Returns one JSON object.
    pub(super) fn json(&self) -> String {
        let row = |row: &AdamRow| {
            json!({
                "dtype": row.dtype.name(),
                "largest_layer": row.largest_layer,
                "total_size": row.total,
                "training_using_adam": row.training,
            })
        };
        let recommended = self
            .fitting
            .map(|number| estimate_as_json(&self.estimates[number], self.workload));
        let estimates = self
            .estimates
            .iter()
            .map(|estimate| estimate_as_json(estimate, self.workload));
        let object = json!({
            "model": self.path,
            "kind": self.model.kind,
            "parameters": self.model.elements(),
            "sequence_length": self.model.sequence(self.workload),
            "dtypes": Vec::from_iter(self.rows.iter().map(row)),
            "estimates": Vec::from_iter(estimates),
            "memory": self.memory,
            "host_memory": self.host_memory,
            "recommended": recommended,
        });
        format!("{object:#}\n")
    }
}

fn estimate_as_json(estimate: &MemoryEstimate, workload: &Workload) -> Value {
    let place = |tier| match tier {
        Tier::Host => "cpu",
        Tier::Disk => "nvme",
        _ => "none",
    };
    json!({
        "strategy": estimate.choice.strategy.name(),
        "offload_optimizer": place(estimate.choice.optimizer),
        "offload_params": place(estimate.choice.parameters),
        "activation_checkpointing": estimate.choice.recompute,
        "bytes_of_rank": {
            "parameters": estimate.parameters,
            "masters": estimate.masters,
            "gradients": estimate.gradients,
            "optimizer": estimate.optimizer,
            "buffers": estimate.buffers,
            "gathered": estimate.gathered,
            "activations": estimate.activations,
            "peak": estimate.device_peak,
            "host": estimate.host,
            "disk": estimate.disk,
        },
        "host_bytes": estimate.of_host(workload.computes_on),
    })
}

/// Returns what ranks compute on, in words.
fn device(workload: &Workload) -> &'static str {
    match workload.computes_on {
        ComputeDevice::Cpu => "CPU",
        ComputeDevice::Cuda => "GPU",
    }
}
