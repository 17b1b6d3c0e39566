//! Memory that direct reads and writes accept: it begins at a block.

use super::BLOCK_BYTES;

/// Owned, zero-initialised elements at an address that is a multiple of [`BLOCK_BYTES`].
#[derive(Debug)]
pub(super) struct AlignedBuffer {
    /// One block more than the elements, so that a block begins early enough somewhere in it.
    memory: Vec<f32>,
    start: usize,
    elements: usize,
}

impl AlignedBuffer {
    pub(super) fn new(elements: usize) -> Self {
        let memory = vec![0.0; elements + BLOCK_BYTES / size_of::<f32>()];
        Self {
            start: memory.as_ptr().align_offset(BLOCK_BYTES),
            elements,
            memory,
        }
    }

    pub(super) fn elements(&self) -> &[f32] {
        &self.memory[self.start..][..self.elements]
    }

    pub(super) fn elements_mut(&mut self) -> &mut [f32] {
        &mut self.memory[self.start..][..self.elements]
    }

    pub(super) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.elements())
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(self.elements_mut())
    }

    /// Returns how much memory the buffer takes.
    pub(super) fn size(&self) -> usize {
        self.memory.len() * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_begin_at_a_block_and_have_all_their_elements() {
        for elements in [0, 1, 1023, 1024, 1025, 100_000] {
            let mut buffer = AlignedBuffer::new(elements);
            assert_eq!(buffer.bytes().as_ptr() as usize % BLOCK_BYTES, 0, "{elements}");
            buffer.elements_mut().fill(1.5);
            assert_eq!(buffer.elements(), vec![1.5; elements]);
            assert_eq!(buffer.bytes_mut().len(), 4 * elements);
        }
    }
}
