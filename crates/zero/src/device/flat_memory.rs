//! Flat f32 state that lasts: in the host's memory, or on a GPU where both can reach it.

use super::Gpu;
use crate::Result;
use sconce_collectives::Buffer;

/// An array of f32.
#[derive(Debug)]
pub(crate) enum FlatMemory {
    Host(Vec<f32>),
    /// Unified memory: kernels work on it, and the host may look.
    Device(Buffer),
}

impl Default for FlatMemory {
    fn default() -> Self {
        Self::Host(Vec::new())
    }
}

impl FlatMemory {
    /// Makes `count` elements of one value, on the GPU if there is one.
    pub(crate) fn filled(gpu: Option<&Gpu>, value: f32, count: usize) -> Result<Self> {
        let Some(gpu) = gpu.filter(|_| count > 0) else {
            return Ok(Self::Host(vec![value; count]));
        };
        let mut buffer = gpu.allocate(count * size_of::<f32>())?;
        if value != 0.0 {
            buffer.as_mut_slice::<f32>().fill(value);
        }
        Ok(Self::Device(buffer))
    }

    /// Makes a copy of elements, on the GPU if there is one.
    pub(crate) fn copied(gpu: Option<&Gpu>, values: &[f32]) -> Result<Self> {
        let Some(gpu) = gpu.filter(|_| !values.is_empty()) else {
            return Ok(Self::Host(values.to_vec()));
        };
        let mut buffer = gpu.allocate(size_of_val(values))?;
        buffer.as_mut_slice().copy_from_slice(values);
        Ok(Self::Device(buffer))
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Host(values) => values.len(),
            Self::Device(buffer) => buffer.len() / size_of::<f32>(),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the elements, for the host.
    pub(crate) fn as_slice(&self) -> &[f32] {
        match self {
            Self::Host(values) => values,
            Self::Device(buffer) => buffer.as_slice(),
        }
    }

    /// Returns the elements, for the host to write.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [f32] {
        match self {
            Self::Host(values) => values,
            Self::Device(buffer) => buffer.as_mut_slice(),
        }
    }

    /// Returns the elements, to be handed to a collective.
    pub(crate) fn for_peers(&mut self) -> &mut [f32] {
        match self {
            Self::Host(values) => values,
            Self::Device(buffer) => buffer.for_peers(),
        }
    }

    /// Returns the memory that kernels work on, if it is such.
    pub(crate) fn on_device(&self) -> Option<&Buffer> {
        match self {
            Self::Host(_) => None,
            Self::Device(buffer) => Some(buffer),
        }
    }

    /// Returns it for writing.
    pub(crate) fn on_device_mut(&mut self) -> Option<&mut Buffer> {
        match self {
            Self::Host(_) => None,
            Self::Device(buffer) => Some(buffer),
        }
    }
}
