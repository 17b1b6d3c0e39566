//! The NCCL backend as a [`Communicator`].

use super::group::Group;
use crate::collective::{Kind, Signature};
use crate::queued::{Behind, Queued};
use crate::{Buffer, Collective, Communicator, Job, Result, Traffic, single};
use std::sync::Arc;

/// A group of ranks with a GPU each, seen by one of them.
#[derive(Debug)]
struct NcclGroup(Group);

/// Makes the communicator of a group.
pub(super) fn communicator(group: Group) -> Arc<dyn Communicator> {
    Arc::new(Queued::new(Arc::new(NcclGroup(group))))
}

impl Communicator for NcclGroup {
    fn rank(&self) -> usize {
        self.0.board.rank
    }

    fn size(&self) -> usize {
        self.0.board.size
    }

    fn backend(&self) -> &'static str {
        "nccl"
    }

    fn execute(&self, collective: Collective<'_>) -> Result<()> {
        self.0.run(collective)
    }

    fn start(&self, job: Job) {
        job(self);
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.0.meet(Signature::of_kind(Kind::Allocate, bytes as u64))?;
        Ok(Buffer::on_heap(bytes))
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        Ok(match self.0.split(color, key)? {
            (Some(group), _) => Some(communicator(group)),
            (None, is_alone) => is_alone.then(single),
        })
    }

    fn traffic(&self) -> Vec<Traffic> {
        self.0.traffic()
    }

    fn abort(&self, reason: &str) {
        self.0.board.fail(self.0.board.rank, reason);
    }
}

impl Behind for NcclGroup {
    fn leave(&self) {
        self.0.board.leave();
    }
}
