//! `--enable_cpu_affinity`: each rank runs on cores of its own.
//!
//! A child inherits the cores of the thread that starts it. So the launcher's main thread, which starts all ranks, takes a
//! rank's cores for the moment of its start: whatever the rank is, all its threads have them from their beginning.

use std::collections::BTreeSet;
use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::fully_sharded::boolean;
use super::host_topology::HostTopology;
use crate::command_error::CommandError;
use sconce_core::environment::ACCELERATE_CPU_AFFINITY;

/// Says whether ranks are to be bound; `lookup` is their environment, where the flag is `ACCELERATE_CPU_AFFINITY`.
///
/// # Errors
/// When the variable says neither.
pub(super) fn is_wanted(lookup: impl Fn(&str) -> Option<String>) -> Result<bool, CommandError> {
    let value = lookup(ACCELERATE_CPU_AFFINITY).unwrap_or_default();
    match value.trim() {
        "" => Ok(false),
        word => boolean(word).map_err(|expected| {
            let error = CommandError::usage(format!("{ACCELERATE_CPU_AFFINITY}={value:?}: {expected}"));
            error.hint("unset it, or use --enable_cpu_affinity")
        }),
    }
}

/// The cores of each rank.
#[derive(Debug)]
pub(super) struct CpuAffinity {
    /// The launcher's own.
    allowed: Vec<usize>,
    shares: Vec<Vec<usize>>,
}

impl CpuAffinity {
    /// Splits the cores that this process may use among the ranks, one for each element of `nodes`: the NUMA node that a
    /// rank's GPU is near to, where that is known.
    ///
    /// # Errors
    /// Why there is nothing to split, as a notice for the user.
    pub(super) fn split(host: &HostTopology, nodes: &[Option<usize>]) -> Result<Self, String> {
        let allowed = allowed()?;
        let shares = shares(host, &allowed, nodes)?;
        Ok(Self { allowed, shares })
    }

    /// The number of cores of the rank that has the fewest.
    pub(super) fn fewest(&self) -> usize {
        self.shares.iter().map(Vec::len).min().unwrap_or(1)
    }

    /// Starts rank `rank` by `start`, whose child has the rank's cores.
    ///
    /// # Errors
    /// Those of `start`, and when the system does not grant the cores.
    pub(super) fn start<T>(&self, rank: usize, start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        run_on(&self.shares[rank])?;
        let started = start();
        run_on(&self.allowed)?;
        started
    }
}

/// Returns the cores that this process may use.
///
/// # Errors
/// The system's reason why they cannot be read.
pub(super) fn allowed() -> Result<Vec<usize>, String> {
    let set = sched_getaffinity(None).map_err(|reason| format!("this process's cores cannot be read: {reason}"))?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Has the calling thread run on `cores` only.
fn run_on(cores: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    cores.iter().for_each(|cpu| set.set(*cpu));
    Ok(sched_setaffinity(None, &set)?)
}

/// Splits `allowed` among ranks that are near to `nodes`: among those of a node its cores, if all have a node and each
/// node enough cores, else all cores among all.
fn shares(host: &HostTopology, allowed: &[usize], nodes: &[Option<usize>]) -> Result<Vec<Vec<usize>>, String> {
    let mut allowed = allowed.to_vec();
    // Logical cores of one physical core stay together.
    allowed.sort_by_cached_key(|cpu| (host.physical_core(*cpu), *cpu));
    if let Some(shares) = near_gpus(host, &allowed, nodes) {
        return Ok(shares);
    }
    match (nodes.len(), allowed.len()) {
        (1, cores) => Err(format!("one rank has all {cores} core(s) to itself")),
        (ranks, cores) if ranks > cores => Err(format!("{ranks} ranks have {cores} core(s) in common")),
        (ranks, _) => Ok(split(&allowed, ranks)),
    }
}

fn near_gpus(host: &HostTopology, allowed: &[usize], nodes: &[Option<usize>]) -> Option<Vec<Vec<usize>>> {
    let nodes = nodes.iter().copied().collect::<Option<Vec<usize>>>()?;
    let mut shares = vec![Vec::new(); nodes.len()];
    for node in BTreeSet::from_iter(&nodes) {
        let of_node = host.cores_of_node(*node);
        let cores = Vec::from_iter(allowed.iter().copied().filter(|cpu| of_node.contains(cpu)));
        let ranks = Vec::from_iter((0..nodes.len()).filter(|rank| nodes[*rank] == *node));
        if cores.len() < ranks.len() {
            return None;
        }
        for (rank, share) in ranks.iter().zip(split(&cores, ranks.len())) {
            shares[*rank] = share;
        }
    }
    Some(shares)
}

/// Cuts `cores` into `parts` pieces whose lengths differ by one at most.
fn split(cores: &[usize], parts: usize) -> Vec<Vec<usize>> {
    let start = |part: usize| part * cores.len() / parts;
    (0..parts)
        .map(|part| cores[start(part)..start(part + 1)].to_vec())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::host_topology::tests::host;
    use super::*;

    #[test]
    fn cores_are_split_evenly_and_in_order_within_what_is_allowed() {
        let (_folder, host) = host(&[]);
        let split = |allowed: &[usize], ranks| shares(&host, allowed, &vec![None; ranks]).unwrap();
        assert_eq!(split(&[0, 1, 2, 3], 2), [[0, 1], [2, 3]]);
        assert_eq!(split(&[4, 5, 9], 2), [vec![4], vec![5, 9]]);
    }

    #[test]
    fn logical_cores_of_one_physical_core_stay_together() {
        let file = |cpu: usize, file: &str| format!("devices/system/cpu/cpu{cpu}/topology/{file}");
        // As x86 counts them: 0 and 2 are one physical core, 1 and 3 the other.
        let files = (0..4).flat_map(|cpu| {
            let core = (cpu % 2).to_string();
            [
                (file(cpu, "physical_package_id"), "0".to_owned()),
                (file(cpu, "core_id"), core),
            ]
        });
        let files = Vec::from_iter(files);
        let files = Vec::from_iter(files.iter().map(|(file, text)| (file.as_str(), text.as_str())));
        let (_folder, host) = host(&files);
        assert_eq!(shares(&host, &[0, 1, 2, 3], &[None, None]).unwrap(), [[0, 2], [1, 3]]);
    }

    #[test]
    fn ranks_with_a_gpu_get_cores_of_its_node() {
        let (_folder, host) = host(&[
            ("devices/system/node/node0/cpulist", "0-3"),
            ("devices/system/node/node1/cpulist", "4-7"),
        ]);
        let near = |allowed: &[usize], nodes: &[Option<usize>]| shares(&host, allowed, nodes).unwrap();
        let all = [0, 1, 2, 3, 4, 5, 6, 7];
        assert_eq!(near(&all, &[Some(1), Some(0)]), [[4, 5, 6, 7], [0, 1, 2, 3]]);
        assert_eq!(near(&all, &[Some(1), Some(1)]), [[4, 5], [6, 7]]);
        assert_eq!(near(&all, &[Some(1)]), [[4, 5, 6, 7]], "also for one rank");
        assert_eq!(
            near(&[0, 1, 4, 5], &[Some(1), Some(1)]),
            [[4], [5]],
            "within what is allowed"
        );
        // Where a node has too few cores, or is not known, all cores are split among all ranks.
        assert_eq!(near(&[0, 1, 2, 4], &[Some(1), Some(1)]), [[0, 1], [2, 4]]);
        assert_eq!(near(&all, &[Some(1), None]), [[0, 1, 2, 3], [4, 5, 6, 7]]);
    }

    #[test]
    fn nothing_to_split_is_told() {
        let (_folder, host) = host(&[]);
        let told = |ranks| shares(&host, &[0, 1], &vec![None; ranks]).unwrap_err();
        assert_eq!(told(1), "one rank has all 2 core(s) to itself");
        assert_eq!(told(3), "3 ranks have 2 core(s) in common");
    }
}
