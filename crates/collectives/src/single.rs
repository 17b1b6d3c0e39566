//! The group of one: every operation is a check and at most a copy.

use crate::{Buffer, Collective, Communicator, Error, Job, Result};
use std::sync::{Arc, OnceLock};

/// Returns a group whose only rank is the caller.
pub fn single() -> Arc<dyn Communicator> {
    Arc::new(SingleCommunicator::default())
}

#[derive(Debug, Default)]
struct SingleCommunicator {
    aborted: OnceLock<String>,
}

impl Communicator for SingleCommunicator {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn backend(&self) -> &'static str {
        "single"
    }

    fn execute(&self, collective: Collective<'_>) -> Result<()> {
        if let Some(reason) = self.aborted.get() {
            return Err(Error::Aborted {
                by: 0,
                reason: reason.clone(),
            });
        }
        collective.check(0, 1)?;
        match collective {
            Collective::ReduceScatter { input, mut output, .. }
            | Collective::AllGather { input, mut output, .. }
            | Collective::AllToAll { input, mut output, .. }
            | Collective::Gather {
                input,
                output: Some(mut output),
                ..
            }
            | Collective::Scatter {
                input: Some(input),
                mut output,
                ..
            } => {
                output.bytes_mut().copy_from_slice(input.bytes());
            }
            Collective::AllGatherEach { input, each, .. } => each.0(0, input),
            _ => {}
        }
        Ok(())
    }

    fn start(&self, job: Job) {
        job(self);
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        Ok(Buffer::on_heap(bytes))
    }

    fn split(&self, color: Option<u32>, _key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        Ok(color.map(|_| single()))
    }

    fn abort(&self, reason: &str) {
        self.aborted.get_or_init(|| reason.to_owned());
    }
}
