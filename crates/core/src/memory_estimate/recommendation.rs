//! The cheapest way to run that fits: the least traffic first, then what costs computing, then what costs waiting.

use super::workload::ComputeDevice;
use super::{MemoryEstimate, RunChoice, RunStrategy, Workload};
use sconce_fsdp::FsdpStrategy;
use sconce_zero::Tier;

/// The memory that there is, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Of each rank's device; on a CPU of each rank.
    pub device: u64,
    /// Of each host; `None` is not looked at.
    pub host: Option<u64>,
}

impl Limits {
    /// Says whether a run fits.
    pub fn fit(&self, estimate: &MemoryEstimate, computes_on: ComputeDevice) -> bool {
        estimate.device_peak <= self.device && self.host.is_none_or(|host| estimate.of_host(computes_on) <= host)
    }
}

/// Returns the ways to run that make sense for a workload, the cheapest first.
///
/// What costs more comes later: each strategy moves more than the one before; computing activations again costs a third of
/// the arithmetic; state on the host is updated by the host; state on disk waits for the disk. Activations are computed
/// again under FSDP's strategies, which have a switch for it.
pub fn candidates(workload: &Workload) -> Vec<RunChoice> {
    let hosts = workload.ranks > workload.ranks_per_host;
    let on_gpu = workload.computes_on == ComputeDevice::Cuda;
    let mut choices = Vec::new();
    let is_of_use = |strategy: &RunStrategy| match strategy {
        RunStrategy::DataParallel => true,
        RunStrategy::Fsdp(strategy) if strategy.is_hybrid() => hosts && workload.ranks_per_host > 1,
        RunStrategy::Zero3 => true,
        _ => workload.ranks > 1,
    };
    let strategies = Vec::from_iter(RunStrategy::ALL.into_iter().filter(is_of_use));
    choices.extend(strategies.iter().map(|strategy| RunChoice::new(*strategy)));
    let recomputed = |strategy| RunChoice {
        recompute: true,
        ..RunChoice::new(RunStrategy::Fsdp(strategy))
    };
    choices.push(recomputed(if workload.ranks > 1 {
        FsdpStrategy::FullShard
    } else {
        FsdpStrategy::NoShard
    }));
    if on_gpu {
        let stages = [RunStrategy::Zero1, RunStrategy::Zero2, RunStrategy::Zero3];
        choices.extend(stages.map(|strategy| RunChoice {
            optimizer: Tier::Host,
            ..RunChoice::new(strategy)
        }));
        choices.push(RunChoice {
            optimizer: Tier::Host,
            parameters: Tier::Host,
            ..RunChoice::new(RunStrategy::Zero3)
        });
        choices.push(RunChoice {
            parameters: Tier::Host,
            optimizer: Tier::Host,
            ..recomputed(FsdpStrategy::FullShard)
        });
    }
    for parameters in [Tier::Device, Tier::Disk] {
        choices.push(RunChoice {
            optimizer: Tier::Disk,
            parameters,
            ..RunChoice::new(RunStrategy::Zero3)
        });
    }
    choices
}
