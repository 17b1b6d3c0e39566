//! What the driver says of each GPU, asked without taking it.

use super::kernels::{Capability, Target};
use super::{FOR_A_DEVICE, Library, refused};
use crate::Result;
use candle_core::cuda::cudarc::driver::{DriverError, result, sys::CUdevice_attribute};
use std::ffi::c_int;

/// A GPU that this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its model, for example `NVIDIA H200`.
    pub name: String,
    /// Its memory in bytes.
    pub memory: usize,
    /// What its cores can do.
    pub capability: Capability,
}

/// Returns the GPUs that this process may use, by their numbers.
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) naming a library that is missing, or with the driver's own reason.
pub fn gpus() -> Result<Vec<Gpu>> {
    (0..super::device_count()?).map(Gpu::of).collect()
}

/// Checks that this program's kernels run on the GPU of a number, which must be below [`device_count`](super::device_count).
///
/// # Errors
/// [`Error::Unsupported`](crate::Error::Unsupported) with what the kernels were compiled for, and what to do.
pub fn check_kernels(number: usize) -> Result<()> {
    let gpu = Gpu::of(number)?;
    Target::of_this_program().and_then(|target| target.check(&gpu.name, gpu.capability))
}

impl Gpu {
    fn of(number: usize) -> Result<Self> {
        FOR_A_DEVICE.iter().try_for_each(Library::require)?;
        Self::asked(number as c_int).map_err(|error| refused(&error))
    }

    fn asked(number: c_int) -> Result<Self, DriverError> {
        result::init()?;
        let device = result::device::get(number)?;
        let attribute = |attribute| {
            // SAFETY: the device was just returned by the driver for its number.
            let value = unsafe { result::device::get_attribute(device, attribute) }?;
            Ok::<_, DriverError>(value.unsigned_abs())
        };
        let capability = Capability {
            major: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        };
        // SAFETY: as above.
        let memory = unsafe { result::device::total_mem(device) }?;
        let name = result::device::get_name(device)?;
        Ok(Self {
            name,
            memory,
            capability,
        })
    }
}
