//! Device memory through which data of the host is staged, with a stream of its own.

use crate::cuda::refused;
use crate::{Error, Result};
use candle_core::cuda::cudarc::driver::{CudaContext, CudaEvent, CudaSlice, CudaStream, DriverError};
use std::sync::Arc;

/// Memory grows by whole pieces of this many bytes.
const PIECE: usize = 1 << 20;

/// An input and an output on one device; all work on them is in one stream.
#[derive(Debug)]
pub(super) struct Memory {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    pub(super) input: CudaSlice<u8>,
    pub(super) output: CudaSlice<u8>,
}

impl Memory {
    /// Takes a device, which becomes that of the calling thread.
    pub(super) fn on_device(number: usize) -> Result<Self> {
        let open = || {
            let context = CudaContext::new(number)?;
            context.bind_to_thread()?;
            let stream = context.new_stream()?;
            let (input, output) = (stream.alloc_zeros(PIECE)?, stream.alloc_zeros(PIECE)?);
            Ok::<_, DriverError>((context, stream, input, output))
        };
        let (context, stream, input, output) = open().map_err(|error| Error::Unsupported {
            what: format!("device cuda:{number} cannot be opened: {error}"),
            hint: "see whether `nvidia-smi` lists a GPU of that number that is free".into(),
        })?;
        Ok(Self {
            context,
            stream,
            input,
            output,
        })
    }

    pub(super) fn device(&self) -> usize {
        self.context.ordinal()
    }

    pub(super) fn stream(&self) -> Arc<CudaStream> {
        Arc::clone(&self.stream)
    }

    /// Says whether input and output are at least as long.
    pub(super) fn holds(&self, (input, output): (usize, usize)) -> bool {
        input <= self.input.len() && output <= self.output.len()
    }

    /// Copies what goes to the device, where there is room for `output` bytes then.
    pub(super) fn fill(&mut self, input: &[u8], output: usize) -> Result<()> {
        self.try_fill(input, output).map_err(|error| refused(&error))
    }

    fn try_fill(&mut self, input: &[u8], output: usize) -> Result<(), DriverError> {
        self.context.bind_to_thread()?;
        for (memory, bytes) in [(&mut self.input, input.len()), (&mut self.output, output)] {
            if memory.len() < bytes {
                // Freed in the order of the stream: nothing of it is under way any more.
                *memory = self.stream.alloc_zeros(bytes.next_multiple_of(PIECE))?;
            }
        }
        if !input.is_empty() {
            self.stream.memcpy_htod(input, &mut self.input)?;
        }
        Ok(())
    }

    /// Makes the device that of the calling thread.
    pub(super) fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(|error| refused(&error))
    }

    /// Marks the end of what is in the stream.
    pub(super) fn mark(&self) -> Result<CudaEvent> {
        self.stream.record_event(None).map_err(|error| refused(&error))
    }

    /// Copies what came from the device, once it is there.
    pub(super) fn read(&self, output: &mut [u8]) -> Result<()> {
        if output.is_empty() {
            return Ok(());
        }
        let part = self.output.slice(..output.len());
        let copied = self.stream.memcpy_dtoh(&part, output);
        copied
            .and_then(|()| self.stream.synchronize())
            .map_err(|error| refused(&error))
    }
}
