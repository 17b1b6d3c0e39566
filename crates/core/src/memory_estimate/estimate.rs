//! What one rank of a run holds.

use super::workload::{ComputeDevice, Workload};
use super::{Activations, Architecture, EstimateError, ModelShape, RunChoice};
use crate::RunSettings;
use sconce_zero::{MemoryForecast, MemoryReport, Tier};

/// Bytes that one rank of a run holds, the one that holds most; what is on the device, on the host and on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryEstimate {
    /// The run.
    pub choice: RunChoice,
    /// Values that the model computes with: of sharded parameters this rank's share.
    pub parameters: u64,
    /// f32 values behind parameters of 16 bits.
    pub masters: u64,
    /// Gradients that last until the step.
    pub gradients: u64,
    /// What the optimizer keeps in memory.
    pub optimizer: u64,
    /// Buckets and communication buffers.
    pub buffers: u64,
    /// The most that is gathered at once, with the memory that is kept for gathers.
    pub gathered: u64,
    /// What a forward keeps and its backward needs beside it, and tables; `None` where nothing is known of the model's layers.
    pub activations: Option<u64>,
    /// Of those, what is there when the forward has ended.
    pub kept_activations: Option<u64>,
    /// The most on the device at once. On a CPU, that is all of the rank's memory.
    pub device_peak: u64,
    /// What lies on the host beside it; 0 on a CPU.
    pub host: u64,
    /// State in files.
    pub disk: u64,
    /// Ranks on a host, whose memory adds up.
    pub ranks_per_host: usize,
}

impl MemoryEstimate {
    /// Estimates one choice.
    ///
    /// # Errors
    /// [`EstimateError::Run`] for a combination that no run can have.
    pub fn new(model: &ModelShape, workload: &Workload, choice: RunChoice) -> Result<Self, EstimateError> {
        Self::with(model, workload, choice, &choice.settings(workload)?)
    }

    /// Estimates a run as it is set, buckets and limits of gathers included; `None` for one whose strategy is the program's own.
    /// What the workload says of ranks and precision must be true of the run.
    ///
    /// # Errors
    /// As [`MemoryEstimate::new`].
    pub fn of_run(
        model: &ModelShape,
        workload: &Workload,
        settings: &RunSettings,
    ) -> Result<Option<Self>, EstimateError> {
        let choice = RunChoice::of_run(settings);
        choice
            .map(|choice| Self::with(model, workload, choice, settings))
            .transpose()
    }

    fn with(
        model: &ModelShape,
        workload: &Workload,
        choice: RunChoice,
        settings: &RunSettings,
    ) -> Result<Self, EstimateError> {
        let options = workload.engine_options(settings)?;
        let planned = model.planned(workload.dtype());
        let forecast = MemoryForecast::new(&planned, &options, workload.ranks, workload.optimizer.state_arrays());
        let (device, host) = match workload.computes_on {
            ComputeDevice::Cpu => (forecast.on_cpu(), MemoryReport::default()),
            ComputeDevice::Cuda => forecast.on_gpu(),
        };
        let recompute = choice.recompute;
        let gated = forecast.has_shards();
        let activations = model.activations(workload);
        let kept = activations
            .as_ref()
            .map(|all| all.kept(recompute, gated) + all.constants);
        let backward = activations.as_ref().map_or(0, |all| all.backward(recompute));
        let disk = device.on_disk + host.on_disk;
        let peak = kept.map(|kept| kept + backward);
        Ok(Self {
            choice,
            parameters: device.parameters + host.parameters,
            masters: device.masters + host.masters,
            gradients: device.gradients + host.gradients,
            optimizer: device.optimizer_state + host.optimizer_state,
            buffers: device.buffers + host.buffers,
            gathered: device.gathered + device.spare,
            activations: peak,
            kept_activations: kept,
            device_peak: device.total() + peak.unwrap_or(0),
            host: host.total(),
            disk,
            ranks_per_host: workload.ranks_per_host.min(workload.ranks).max(1),
        })
    }

    /// Returns what lies on the host for all of its ranks: on a CPU that is all there is.
    pub fn of_host(&self, computes_on: ComputeDevice) -> u64 {
        let of_rank = match computes_on {
            ComputeDevice::Cpu => self.device_peak,
            ComputeDevice::Cuda => self.host,
        };
        of_rank * self.ranks_per_host as u64
    }

    /// Says whether anything is offloaded.
    pub fn offloads(&self) -> bool {
        self.choice.parameters != Tier::Device || self.choice.optimizer != Tier::Device
    }
}

impl ModelShape {
    /// Returns the tokens of a sample: those of the workload, else what the configuration says.
    pub fn sequence(&self, workload: &Workload) -> Option<usize> {
        let by_default = match &self.architecture {
            Architecture::Llama(shape) => Some(shape.default_sequence()),
            Architecture::CogVideoX(shape) => Some(shape.default_sequence()),
            Architecture::Unknown => None,
        };
        workload.sequence.or(by_default)
    }

    /// Counts the activations of one micro-batch; `None` where nothing is known of the model's layers.
    pub fn activations(&self, workload: &Workload) -> Option<Activations> {
        let sequence = self.sequence(workload)?;
        match &self.architecture {
            Architecture::Llama(shape) => Some(shape.activations(workload, sequence)),
            Architecture::CogVideoX(shape) => Some(shape.activations(workload, sequence)),
            Architecture::Unknown => None,
        }
    }
}
