//! What CUDA this machine has, found out before anything calls it.
//!
//! A program that looks CUDA up when it first needs it starts where there is none; the bindings then panic in the first
//! call. Who is about to use a GPU asks here first.

mod gpu;
mod kernels;
mod unified;

pub use gpu::{Gpu, check_kernels, gpus};
pub use kernels::Capability;
pub(crate) use unified::Unified;
pub use unified::{Lent, UnifiedMemory, is_unified};

use crate::{Error, Result};
use candle_core::cuda::cudarc::driver::{CudaContext, DriverError};

/// What one GPU needs: the driver, and what candle loads when it opens a device.
const FOR_A_DEVICE: [Library; 3] = [
    Library {
        name: "cuda",
        file: "libcuda.so.1 (the NVIDIA driver)",
        hint: "install the driver (`nvidia-smi` then lists the GPUs), or compute on the CPU",
    },
    Library {
        name: "cublas",
        file: "libcublas.so",
        hint: CUDA_HINT,
    },
    Library {
        name: "curand",
        file: "libcurand.so",
        hint: CUDA_HINT,
    },
];

const CUDA_HINT: &str = "install CUDA's libraries, and put their folder into LD_LIBRARY_PATH";

/// NCCL; the wheels that bring it have only `libnccl.so.2`, a name that the bindings do not look for.
#[cfg(feature = "nccl")]
const NCCL: Library = Library {
    name: "nccl",
    file: "libnccl.so",
    hint: "install NCCL; if only libnccl.so.2 is there, put a link to it with the name libnccl.so into a folder of \
           LD_LIBRARY_PATH",
};

/// What follows a library's name: the names that the bindings try.
const ENDINGS: [&str; 7] = ["", ".13", ".12", ".11", ".10", ".9", ".1"];

/// A shared library that is looked for.
#[derive(Debug)]
struct Library {
    name: &'static str,
    file: &'static str,
    hint: &'static str,
}

impl Library {
    fn require(&self) -> Result<()> {
        if ENDINGS
            .iter()
            .any(|ending| loads(&format!("lib{}.so{ending}", self.name)))
        {
            return Ok(());
        }
        Err(Error::Unsupported {
            what: format!("{} is not present", self.file),
            hint: self.hint.into(),
        })
    }
}

/// Returns how many GPUs this process may use.
///
/// # Errors
/// [`Error::Unsupported`] naming a library that is missing, or with the driver's own reason.
pub fn device_count() -> Result<usize> {
    FOR_A_DEVICE.iter().try_for_each(Library::require)?;
    let count = CudaContext::device_count().map_err(|error| refused(&error))?;
    Ok(count as usize)
}

/// Checks that NCCL is there.
///
/// # Errors
/// [`Error::Unsupported`] saying how to get it.
#[cfg(feature = "nccl")]
pub(crate) fn require_nccl() -> Result<()> {
    NCCL.require()
}

/// Makes an error of what the driver says.
pub(crate) fn refused(error: &DriverError) -> Error {
    Error::Unsupported {
        what: format!("the NVIDIA driver refused: {error}"),
        hint: "see whether `nvidia-smi` lists a GPU that is free".into(),
    }
}

/// Says whether a shared library can be loaded; it then stays.
fn loads(file: &str) -> bool {
    // SAFETY: the initialisers of CUDA's libraries, which the bindings load by the same names, have no preconditions.
    let library = unsafe { libloading::Library::new(file) };
    library.map(std::mem::forget).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_a_remedy() {
        let library = Library {
            name: "sconce-has-no-such-library",
            file: "libnone.so",
            hint: "install it",
        };
        let message = library.require().unwrap_err().to_string();
        assert_eq!(message, "libnone.so is not present: install it");
    }
}
