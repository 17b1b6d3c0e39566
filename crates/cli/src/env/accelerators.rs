//! GPUs and NCCL, or why there are none.

use std::fs;

use super::Report;

/// Where the driver of NVIDIA's GPUs tells its version.
const DRIVER: &str = "/proc/driver/nvidia/version";

pub(super) fn tell(report: &mut Report) {
    let driver = fs::read_to_string(DRIVER);
    let driver = driver.map(|text| text.lines().next().unwrap_or_default().to_owned());
    report.add(
        "gpu driver",
        driver.unwrap_or_else(|_| format!("none ({DRIVER} is not there)")),
    );
    tell_gpus(report);
    report.add("nccl", nccl());
}

#[cfg(feature = "cuda")]
fn tell_gpus(report: &mut Report) {
    use sconce_collectives::cuda;

    let gpus = match cuda::gpus() {
        Ok(gpus) => gpus,
        Err(reason) => return report.add("gpus", format!("none: {reason}")),
    };
    report.add("gpus", gpus.len().to_string());
    for (number, gpu) in gpus.iter().enumerate() {
        let memory = super::gib(gpu.memory as u64);
        let kernels = match cuda::check_kernels(number) {
            Ok(()) => "this program's kernels run on it".to_owned(),
            Err(reason) => reason.to_string(),
        };
        let (name, capability) = (&gpu.name, gpu.capability);
        let value = format!("{name}, {memory}, compute capability {capability}; {kernels}");
        report.add(format!("gpu {number}"), value);
    }
}

#[cfg(not(feature = "cuda"))]
fn tell_gpus(report: &mut Report) {
    report.add(
        "gpus",
        "none: this program was built without CUDA: build it with `--features cuda`, or compute on the CPU",
    );
}

#[cfg(feature = "nccl")]
fn nccl() -> String {
    sconce_collectives::nccl::version().unwrap_or_else(|reason| format!("none: {reason}"))
}

#[cfg(not(feature = "nccl"))]
fn nccl() -> String {
    "none: this program was built without the feature nccl".to_owned()
}
