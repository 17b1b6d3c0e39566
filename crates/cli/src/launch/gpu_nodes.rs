//! Which NUMA node each rank's GPU is near to, as far as the launcher can know without CUDA.

use super::gpu_ids::CUDA_VISIBLE_DEVICES;
use super::host_topology::HostTopology;
use sconce_collectives::Backend;
use sconce_core::DeviceRequest;

/// How the driver counts GPUs: `PCI_BUS_ID`, else the fastest first. Read by the driver.
const CUDA_DEVICE_ORDER: &str = "CUDA_DEVICE_ORDER";

/// Returns the node of each of `ranks` ranks of this host; `None` for a rank without a GPU, or where it is not known.
///
/// `lookup` is the environment of the ranks.
pub(super) fn gpu_nodes(
    host: &HostTopology,
    ranks: usize,
    backend: Backend,
    lookup: impl Fn(&str) -> Option<String>,
) -> Vec<Option<usize>> {
    let unknown = vec![None; ranks];
    let request = match DeviceRequest::asked_for(&lookup) {
        Ok(Some(request)) => request,
        // A launcher without NCCL starts programs that have it.
        Ok(None) if backend == Backend::Nccl => DeviceRequest::GpuOfLocalRank,
        Ok(None) | Err(_) => return unknown,
    };
    let gpus = host.gpus();
    // The driver's numbers are places on the bus where it is told so, or has no faster one to put first.
    let are_alike = gpus.windows(2).all(|pair| pair[0].model == pair[1].model);
    let in_bus_order = lookup(CUDA_DEVICE_ORDER).is_some_and(|order| order.trim() == "PCI_BUS_ID");
    if !are_alike && !in_bus_order {
        return unknown;
    }
    let visible = match lookup(CUDA_VISIBLE_DEVICES) {
        None => Some((0..gpus.len()).collect()),
        // Names in the place of numbers say nothing about the bus.
        Some(list) => list.split(',').map(|id| id.trim().parse().ok()).collect(),
    };
    let visible: Vec<usize> = visible.unwrap_or_default();
    let node = |rank: usize| {
        let number = match request {
            DeviceRequest::Cpu => return None,
            DeviceRequest::GpuOfLocalRank => rank,
            DeviceRequest::Gpu(number) => number,
        };
        gpus.get(*visible.get(number)?)?.node
    };
    (0..ranks).map(node).collect()
}

#[cfg(test)]
mod tests {
    use sconce_core::environment::{ACCELERATE_USE_CPU, SCONCE_DEVICE};

    use super::super::host_topology::tests::host;
    use super::*;

    fn nodes(models: [&str; 2], backend: Backend, variables: &[(&str, &str)]) -> Vec<Option<usize>> {
        let files = models.iter().enumerate().flat_map(|(node, model)| {
            let file = |name: &str| format!("bus/pci/devices/0000:{node}b:00.0/{name}");
            [
                (file("vendor"), "0x10de".to_owned()),
                (file("class"), "0x030200".to_owned()),
                (file("device"), (*model).to_owned()),
                (file("numa_node"), node.to_string()),
            ]
        });
        let files = Vec::from_iter(files);
        let files = Vec::from_iter(files.iter().map(|(file, text)| (file.as_str(), text.as_str())));
        let (_folder, host) = host(&files);
        gpu_nodes(&host, 2, backend, |name| {
            let found = variables.iter().find(|(of, _)| *of == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    const ALIKE: [&str; 2] = ["0x2335", "0x2335"];
    const CUDA: (&str, &str) = (SCONCE_DEVICE, "cuda");

    #[test]
    fn a_rank_is_near_the_gpu_that_it_computes_on() {
        let shm = |variables: &[_]| nodes(ALIKE, Backend::Shm, variables);
        assert_eq!(shm(&[]), [None, None], "the CPU");
        assert_eq!(shm(&[CUDA]), [Some(0), Some(1)]);
        assert_eq!(shm(&[CUDA, (CUDA_VISIBLE_DEVICES, "1,0")]), [Some(1), Some(0)]);
        assert_eq!(shm(&[(SCONCE_DEVICE, "cuda:1")]), [Some(1), Some(1)]);
        for use_cpu in ["", "false"] {
            let variables = [(ACCELERATE_USE_CPU, use_cpu)];
            assert_eq!(nodes(ALIKE, Backend::Nccl, &variables), [Some(0), Some(1)]);
        }
        assert_eq!(
            nodes(ALIKE, Backend::Nccl, &[(ACCELERATE_USE_CPU, "true")]),
            [None, None]
        );
        assert_eq!(
            nodes(ALIKE, Backend::Nccl, &[(SCONCE_DEVICE, "cuda:0")]),
            [Some(0), Some(0)]
        );
    }

    #[test]
    fn what_cannot_be_known_is_not_guessed() {
        let mixed = |variables: &[_]| nodes(["0x2335", "0x20b0"], Backend::Shm, variables);
        assert_eq!(mixed(&[CUDA]), [None, None], "the driver may put the second first");
        assert_eq!(mixed(&[CUDA, (CUDA_DEVICE_ORDER, "PCI_BUS_ID")]), [Some(0), Some(1)]);
        let names = [CUDA, (CUDA_VISIBLE_DEVICES, "GPU-8a1f,GPU-77b0")];
        assert_eq!(nodes(ALIKE, Backend::Shm, &names), [None, None]);
        let missing = [CUDA, (CUDA_VISIBLE_DEVICES, "0,7")];
        assert_eq!(nodes(ALIKE, Backend::Shm, &missing), [Some(0), None]);
    }
}
