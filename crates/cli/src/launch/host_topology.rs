//! Where cores and GPUs lie in this host, as the kernel says below `/sys`.

use std::fs;
use std::path::{Path, PathBuf};

/// NVIDIA's number among makers of PCI devices.
const NVIDIA: &str = "0x10de";
/// Starts of the classes of devices that compute: with a display, and without.
const CLASSES: [&str; 2] = ["0x0300", "0x0302"];

/// The kernel's description of this host.
#[derive(Debug)]
pub(super) struct HostTopology {
    root: PathBuf,
}

/// A GPU on the PCI bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PciGpu {
    /// Its model's number; GPUs of one model have the same.
    pub(super) model: String,
    /// The NUMA node that it is near to, where the kernel knows.
    pub(super) node: Option<usize>,
}

impl HostTopology {
    /// Reads this host's own description.
    pub(super) fn of_host() -> Self {
        Self { root: "/sys".into() }
    }

    /// Returns how many logical cores are at work; 0 where the kernel does not say.
    pub(super) fn cores(&self) -> usize {
        let online = text(&self.root.join("devices/system/cpu/online"));
        online.and_then(|list| cpus(&list)).map_or(0, |cpus| cpus.len())
    }

    /// Returns the package and the number in it of the physical core that a logical one belongs to; logical cores that
    /// share one come together when sorted by it.
    pub(super) fn physical_core(&self, cpu: usize) -> (usize, usize) {
        let topology = self.root.join(format!("devices/system/cpu/cpu{cpu}/topology"));
        let number = |file: &str| text(&topology.join(file))?.parse().ok();
        match (number("physical_package_id"), number("core_id")) {
            (Some(package), Some(core)) => (package, core),
            _ => (0, cpu),
        }
    }

    /// Returns the logical cores of a NUMA node; none where there is no such node.
    pub(super) fn cores_of_node(&self, node: usize) -> Vec<usize> {
        let list = text(&self.root.join(format!("devices/system/node/node{node}/cpulist")));
        list.and_then(|list| cpus(&list)).unwrap_or_default()
    }

    /// Returns NVIDIA's GPUs in the order of their places on the PCI bus.
    pub(super) fn gpus(&self) -> Vec<PciGpu> {
        let devices = fs::read_dir(self.root.join("bus/pci/devices")).into_iter().flatten();
        let mut folders = Vec::from_iter(devices.filter_map(|device| Some(device.ok()?.path())));
        // Addresses such as 0000:3b:00.0, in digits of 16.
        folders.sort_unstable();
        let is_gpu = |folder: &PathBuf| {
            let is = |file: &str, start: &str| text(&folder.join(file)).is_some_and(|text| text.starts_with(start));
            is("vendor", NVIDIA) && CLASSES.iter().any(|class| is("class", class))
        };
        let gpu = |folder: PathBuf| PciGpu {
            model: text(&folder.join("device")).unwrap_or_default(),
            // -1 where the kernel does not know.
            node: text(&folder.join("numa_node")).and_then(|node| node.parse().ok()),
        };
        folders.into_iter().filter(is_gpu).map(gpu).collect()
    }
}

fn text(file: &Path) -> Option<String> {
    Some(fs::read_to_string(file).ok()?.trim().to_owned())
}

/// Reads a list such as `0-3,8,10-11`.
fn cpus(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for range in list.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A host made of files, each with its text.
    pub(in crate::launch) fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, HostTopology) {
        let folder = tempfile::tempdir().unwrap();
        for (file, text) in files {
            let file = folder.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, format!("{text}\n")).unwrap();
        }
        let root = folder.path().to_owned();
        (folder, HostTopology { root })
    }

    #[test]
    fn gpus_come_in_the_order_of_the_bus_and_other_devices_not_at_all() {
        let device = |address: &str, vendor: &str, class: &str, node: &str| {
            [
                ("vendor", vendor),
                ("class", class),
                ("device", "0x2335"),
                ("numa_node", node),
            ]
            .map(|(file, text)| (format!("bus/pci/devices/{address}/{file}"), text.to_owned()))
        };
        let files = [
            device("0000:9b:00.0", NVIDIA, "0x030200", "1"),
            device("0000:1b:00.0", NVIDIA, "0x030200", "0"),
            device("0000:1c:00.0", NVIDIA, "0x068000", "0"),   // a bridge
            device("0000:02:00.0", "0x1a03", "0x030000", "0"), // the board's own display
            device("0000:9d:00.0", NVIDIA, "0x030000", "-1"),
        ];
        let files = Vec::from_iter(
            files
                .iter()
                .flatten()
                .map(|(file, text)| (file.as_str(), text.as_str())),
        );
        let (_folder, host) = host(&files);
        let nodes = Vec::from_iter(host.gpus().into_iter().map(|gpu| gpu.node));
        assert_eq!(nodes, [Some(0), Some(1), None]);
    }

    #[test]
    fn cores_are_read_as_the_kernel_lists_them() {
        let (_folder, host) = host(&[
            ("devices/system/cpu/online", "0-7,10"),
            ("devices/system/node/node1/cpulist", "2-3,8"),
            ("devices/system/cpu/cpu5/topology/physical_package_id", "1"),
            ("devices/system/cpu/cpu5/topology/core_id", "3"),
        ]);
        assert_eq!(host.cores(), 9);
        assert_eq!(host.cores_of_node(1), [2, 3, 8]);
        assert_eq!(host.cores_of_node(0), [0; 0]);
        assert_eq!(host.physical_core(5), (1, 3));
        assert_eq!(
            host.physical_core(6),
            (0, 6),
            "each core by itself where the kernel says nothing"
        );
    }
}
