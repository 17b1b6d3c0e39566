//! Where a rank computes, and clear refusals of what this build or machine does not have.

use crate::settings::Environment;
use crate::{Error, Result, World, environment as variable};
use candle_core::Device;
use sconce_collectives::Backend;

/// What a rank is asked to compute on.
///
/// ```
/// use sconce_core::{DeviceRequest, World};
///
/// let request = DeviceRequest::from_lookup(|name| (name == "SCONCE_DEVICE").then(|| "cpu".to_owned()))?;
/// assert_eq!(request, DeviceRequest::Cpu);
/// assert!(request.open(&World::single())?.is_cpu());
/// # Ok::<(), sconce_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceRequest {
    /// The CPU.
    #[default]
    Cpu,
    /// The GPU whose number is the rank's on its host: one for each rank.
    GpuOfLocalRank,
    /// The GPU of this number, from 0, among those that the process may use.
    Gpu(usize),
}

impl DeviceRequest {
    /// Reads an environment given as a function from name to value: what is [asked for](Self::asked_for), else a GPU for
    /// each rank where the backend is NCCL, else the CPU.
    ///
    /// # Errors
    /// Those of [`asked_for`](Self::asked_for), and [`Error::Collectives`] for a backend that there is not.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        match Self::asked_for(&lookup)? {
            Some(request) => Ok(request),
            // A build without the backend is told so when ranks join.
            None if Backend::from_lookup(&lookup)? == Backend::Nccl && Backend::Nccl.is_built() => {
                Ok(Self::GpuOfLocalRank)
            }
            None => Ok(Self::Cpu),
        }
    }

    /// Reads what an environment asks for whatever the backend: `SCONCE_DEVICE`, else the CPU where `ACCELERATE_USE_CPU` is
    /// true; `None` where it asks for nothing.
    ///
    /// # Errors
    /// [`Error::Setting`] for another device than `cpu`, `cuda` and `cuda:N`, and for a GPU where the CPU is asked for;
    /// [`Error::Device`] for `metal`.
    pub fn asked_for(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let environment = Environment { lookup: &lookup };
        if let Some(device) = lookup(variable::SCONCE_DEVICE).map(|text| text.trim().to_ascii_lowercase())
            && (device == "metal" || device.starts_with("metal:"))
        {
            let reason =
                "Sconce does not compute on Metal: it runs on Linux, where there is none; use cpu or cuda".into();
            return Err(Error::Device { device, reason });
        }
        let must_be_cpu = environment.flag(variable::ACCELERATE_USE_CPU)? == Some(true);
        let named = environment.value(
            variable::SCONCE_DEVICE,
            "expected cpu, cuda (one GPU for each rank of a host) or cuda:N (the GPU of that number, from 0)",
            Self::named,
        )?;
        match named {
            Some(named) if must_be_cpu && named != Self::Cpu => Err(Error::Setting {
                setting: variable::SCONCE_DEVICE,
                value: named.to_string(),
                expected: format!(
                    "{} (`sconce launch --cpu`) asks for the CPU; leave out one of the two",
                    variable::ACCELERATE_USE_CPU
                ),
            }),
            None if must_be_cpu => Ok(Some(Self::Cpu)),
            named => Ok(named),
        }
    }

    fn named(text: &str) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "cpu" => Some(Self::Cpu),
            "cuda" => Some(Self::GpuOfLocalRank),
            text => text.strip_prefix("cuda:")?.parse().ok().map(Self::Gpu),
        }
    }

    /// Returns the number of the GPU that a rank is to use; `None` for the CPU.
    pub fn gpu(self, world: &World) -> Option<usize> {
        match self {
            Self::Cpu => None,
            Self::GpuOfLocalRank => Some(world.local_rank),
            Self::Gpu(number) => Some(number),
        }
    }

    /// Opens the device. A GPU gets a stream of its own, which all threads of the process share.
    ///
    /// # Errors
    /// [`Error::Device`]: this program was built without CUDA, the driver or a library is missing, there are fewer GPUs
    /// than ranks or none of that number, the GPU is taken, or this program's kernels do not run on it.
    pub fn open(self, world: &World) -> Result<Device> {
        let Some(number) = self.gpu(world) else {
            return Ok(Device::Cpu);
        };
        self.open_gpu(number, world).map_err(|reason| Error::Device {
            device: format!("cuda:{number}"),
            reason,
        })
    }

    #[cfg(feature = "cuda")]
    fn open_gpu(self, number: usize, world: &World) -> Result<Device, String> {
        let gpus = sconce_collectives::cuda::device_count().map_err(|error| error.to_string())?;
        self.check_number(number, world, gpus)?;
        sconce_collectives::cuda::check_kernels(number).map_err(|error| error.to_string())?;
        Device::new_cuda_with_stream(number).map_err(|error| not_opened(&error.to_string()))
    }

    #[cfg(not(feature = "cuda"))]
    fn open_gpu(self, _: usize, _: &World) -> Result<Device, String> {
        Err("this program was built without CUDA: build it with `--features cuda`, or compute on the CPU".into())
    }

    /// Checks the number of a GPU against how many there are.
    #[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "needs GPUs to count"))]
    fn check_number(self, number: usize, world: &World, gpus: usize) -> Result<(), String> {
        let hidden = "CUDA_VISIBLE_DEVICES may hide others";
        match self {
            Self::GpuOfLocalRank if world.local_size > gpus => Err(format!(
                "this host has {} rank(s) and {gpus} GPU(s) that they may use: start at most {gpus} rank(s) here, or let \
                 ranks have a GPU in common with cuda:N; {hidden}",
                world.local_size
            )),
            _ if number >= gpus => Err(format!(
                "this process may use {gpus} GPU(s), which count from 0: choose a smaller number; {hidden}"
            )),
            _ => Ok(()),
        }
    }
}

/// Makes a reason of what the driver says when it does not open a GPU.
#[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "needs a GPU to open"))]
fn not_opened(error: &str) -> String {
    let remedy = if error.contains("CUDA_ERROR_DEVICE_UNAVAILABLE") {
        "another process has it for itself (see `nvidia-smi`); choose another with --gpu_ids or CUDA_VISIBLE_DEVICES"
    } else if error.contains("CUDA_ERROR_OUT_OF_MEMORY") {
        "other processes have its memory (see `nvidia-smi`); choose another with --gpu_ids or CUDA_VISIBLE_DEVICES"
    } else {
        "see whether `nvidia-smi` lists it without an error"
    };
    format!("it cannot be opened: {remedy}: {error}")
}

impl std::fmt::Display for DeviceRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::GpuOfLocalRank => f.write_str("cuda"),
            Self::Gpu(number) => write!(f, "cuda:{number}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(local_rank: usize, local_size: usize) -> World {
        World {
            rank: local_rank,
            size: local_size,
            local_rank,
            local_size,
            ..World::single()
        }
    }

    #[test]
    fn each_rank_of_a_host_has_a_gpu_of_its_own_unless_one_is_named() {
        assert_eq!(DeviceRequest::Cpu.gpu(&world(3, 4)), None);
        assert_eq!(DeviceRequest::GpuOfLocalRank.gpu(&world(3, 4)), Some(3));
        assert_eq!(DeviceRequest::Gpu(0).gpu(&world(3, 4)), Some(0));
    }

    #[test]
    fn a_gpu_that_is_taken_is_told_with_a_remedy() {
        // As candle words the driver's error.
        let unavailable = "DriverError(CUDA_ERROR_DEVICE_UNAVAILABLE, \"CUDA-capable device(s) is/are busy\")";
        let message = not_opened(unavailable);
        assert!(
            message.contains("for itself") && message.ends_with(unavailable),
            "{message}"
        );
        assert!(not_opened("DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"\")").contains("its memory"));
        assert!(not_opened("DriverError(CUDA_ERROR_ECC_UNCORRECTABLE, \"\")").contains("without an error"));
    }

    #[test]
    fn more_ranks_than_gpus_and_a_missing_number_are_told_apart() {
        let check = |request: DeviceRequest, world: &World, gpus| {
            let number = request.gpu(world).expect("a GPU is asked for");
            request.check_number(number, world, gpus)
        };
        assert_eq!(check(DeviceRequest::GpuOfLocalRank, &world(1, 2), 2), Ok(()));
        assert_eq!(check(DeviceRequest::Gpu(1), &world(0, 4), 2), Ok(()));
        // Also the ranks that would get a GPU are told: all end with the same reason.
        let message = check(DeviceRequest::GpuOfLocalRank, &world(0, 4), 2).unwrap_err();
        assert!(
            message.contains("4 rank(s) and 2 GPU(s)") && message.contains("at most 2"),
            "{message}"
        );
        let message = check(DeviceRequest::Gpu(2), &world(0, 1), 2).unwrap_err();
        assert!(message.contains("may use 2 GPU(s)"), "{message}");
    }
}
